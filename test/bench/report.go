package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

// A figure is one measured number.
type figure struct {
	Name     string             `json:"figure"`
	Value    float64            `json:"value"`
	Unit     string             `json:"unit"`
	Against  string             `json:"baseline_name,omitempty"`
	Baseline float64            `json:"baseline,omitempty"`
	Ratio    float64            `json:"ratio,omitempty"` // over 1: better than the baseline
	Target   string             `json:"target,omitempty"`
	Samples  int                `json:"samples"`
	Spread   *spreadOf          `json:"spread,omitempty"`
	Others   *spreadOf          `json:"baseline_spread,omitempty"`
	Parts    map[string]float64 `json:"parts,omitempty"`
	PartUnit string             `json:"parts_unit,omitempty"`
}

// spreadOf tells how much samples differ.
type spreadOf struct {
	Min float64 `json:"min"`
	P10 float64 `json:"p10"`
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

func (s samples) spread() *spreadOf {
	if len(s) == 0 {
		return nil
	}
	r := func(q float64) float64 { return digits(s.quantile(q)) }
	return &spreadOf{Min: r(0), P10: r(0.1), P50: r(0.5), P90: r(0.9), P99: r(0.99), Max: r(1)}
}

// digits keeps four digits: more would claim what no benchmark knows.
func digits(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

// A report is what one benchmark found.
type report struct {
	Benchmark string   `json:"benchmark"`
	Machine   machine  `json:"machine"`
	Figures   []figure `json:"figures"`
}

type machine struct {
	CPUs        int     `json:"cpus"`
	Model       string  `json:"cpu_model"`
	MemoryBytes int64   `json:"memory_bytes"`
	Kernel      string  `json:"kernel"`
	Go          string  `json:"go"`
	Load        float64 `json:"load_before"` // of others: figures of a busy machine are worth less
}

func newReport(name string) *report {
	read := func(path string) string { b, _ := os.ReadFile(path); return string(b) }
	m := machine{CPUs: runtime.NumCPU(), Go: runtime.Version(), Kernel: strings.TrimSpace(read("/proc/sys/kernel/osrelease"))}
	for line := range strings.Lines(read("/proc/cpuinfo")) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			m.Model = strings.TrimSpace(v)
			break
		}
	}
	m.MemoryBytes = memInfo("MemTotal")
	_, _ = fmt.Sscan(read("/proc/loadavg"), &m.Load) // stays 0
	return &report{Benchmark: name, Machine: m}
}

// add prints a figure and keeps it. better says whether a lower value is the better one.
func (r *report) add(f figure, lowerIsBetter bool) {
	if f.Baseline != 0 {
		f.Ratio = f.Value / f.Baseline
		if lowerIsBetter {
			f.Ratio = 1 / f.Ratio
		}
	}
	f.Value, f.Baseline, f.Ratio = digits(f.Value), digits(f.Baseline), digits(f.Ratio)
	for k, v := range f.Parts {
		f.Parts[k] = digits(v)
	}
	r.Figures = append(r.Figures, f)
	baseline, ratio := "-", "-"
	if f.Baseline != 0 {
		baseline, ratio = fmt.Sprint(f.Baseline), fmt.Sprint(f.Ratio)
	}
	fmt.Printf("%s.%s %v %s %s %s\n", r.Benchmark, f.Name, f.Value, f.Unit, baseline, ratio)
	if s := f.Spread; s != nil {
		fmt.Fprintf(os.Stderr, "    n=%d min %v p10 %v p50 %v p90 %v p99 %v max %v", f.Samples, s.Min, s.P10, s.P50, s.P90, s.P99, s.Max)
		if f.Target != "" {
			fmt.Fprintf(os.Stderr, "; target %s", f.Target)
		}
		fmt.Fprintln(os.Stderr)
	}
	if len(f.Parts) > 0 {
		fmt.Fprintf(os.Stderr, "    %s by part: %v\n", f.PartUnit, f.Parts)
	}
}

// write keeps the report as JSON.
func (r *report) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, r.Benchmark+".json"), append(b, '\n'), 0o644)
}
