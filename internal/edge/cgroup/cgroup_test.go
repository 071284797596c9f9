package cgroup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"dsec/internal/linux"
	"dsec/internal/linux/mountinfo"
	"dsec/sandbox"
)

const (
	hybridTable = `31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
`
	v2Table = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
)

func TestDetect(t *testing.T) {
	all := []string{"cpuset", "cpu", "io", "memory", "hugetlb", "pids"}
	cases := map[string]struct {
		table     string
		magic     map[string]int64 // overrides of what the table says
		available []string
		mode      Mode
		reason    string
	}{
		"v2":                        {table: v2Table, available: all, mode: V2},
		"v1 with a v2 tree":         {table: hybridTable, available: []string{"hugetlb"}, mode: Hybrid},
		"v1 alone":                  {table: strings.Join(strings.SplitAfter(hybridTable, "\n")[:4], ""), reason: "no_cgroup2"},
		"nothing":                   {table: "", reason: "no_cgroup2"},
		"split over v1 and v2":      {table: strings.Replace(hybridTable, "rw,pids", "rw,freezer", 1), available: []string{"pids"}, reason: "no_cgroup_controller"},
		"v2 without controllers":    {table: v2Table, available: []string{"cpu"}, reason: "no_cgroup_controller"},
		"a tmpfs where v2 is said":  {table: v2Table, magic: map[string]int64{"/sys/fs/cgroup": linux.MagicTmpfs}, available: all, reason: "no_cgroup2"},
		"a v1 mount that is hidden": {table: hybridTable, magic: map[string]int64{"/sys/fs/cgroup/memory": linux.MagicTmpfs}, available: []string{}, reason: "no_cgroup_controller"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			mounts, err := mountinfo.Parse(strings.NewReader(c.table))
			if err != nil {
				t.Fatal(err)
			}
			magic := func(p string) (int64, error) {
				if m, ok := c.magic[p]; ok {
					return m, nil
				}
				m, _ := mountinfo.At(mounts, p)
				return map[string]int64{"cgroup": linux.MagicCgroup, "cgroup2": linux.MagicCgroup2, "tmpfs": linux.MagicTmpfs}[m.Type], nil
			}
			l, err := detect(mounts, magic, func(string) ([]string, error) { return c.available, nil })
			if c.reason != "" {
				if sandbox.ReasonOf(err) != c.reason || sandbox.ClassOf(err) != sandbox.Unsupported {
					t.Fatalf("error %v, want reason %s", err, c.reason)
				}
				return
			}
			if err != nil || l.mode != c.mode {
				t.Fatalf("mode %s, error %v; want %s", l.mode, err, c.mode)
			}
		})
	}
}

func testTree(mode Mode, cpus int) *Tree {
	t := &Tree{name: "dsec-x", v2: "/v2/dsec-x", layout: layout{mode: mode}}
	if mode == Hybrid {
		t.v1 = map[string]string{"memory": "/memory/dsec-x", "cpu": "/cpu/dsec-x", "pids": "/pids/dsec-x"}
	}
	for i := range cpus {
		t.cpus = append(t.cpus, i)
	}
	return t
}

// flatten is a plan as "directory/file=value", relative to the sandbox.
func flatten(p plan, id sandbox.ID) []string {
	var out []string
	for _, g := range p.groups {
		dir := strings.ReplaceAll(g.dir, string(id), "ID")
		out = append(out, dir)
		for _, s := range g.settings {
			out = append(out, filepath.Join(dir, s.file)+"="+s.value)
		}
	}
	return out
}

func TestPlanV2(t *testing.T) {
	id := sandbox.NewID("abcde")
	p := testTree(V2, 4).plan(id, sandbox.Limits{Memory: 1 << 30, CPU: 1.5, PIDs: 100})
	want := []string{
		"/v2/dsec-x/ID", "/v2/dsec-x/ID/cpu.weight=150", "/v2/dsec-x/ID/cgroup.subtree_control=+memory +cpu +pids",
		"/v2/dsec-x/ID/aether", "/v2/dsec-x/ID/aether/memory.max=67108864", "/v2/dsec-x/ID/aether/memory.swap.max=0", "/v2/dsec-x/ID/aether/cpu.weight=10000", "/v2/dsec-x/ID/aether/pids.max=512",
		"/v2/dsec-x/ID/user", "/v2/dsec-x/ID/user/memory.max=1073741824", "/v2/dsec-x/ID/user/memory.swap.max=0",
		"/v2/dsec-x/ID/user/memory.oom.group=0", "/v2/dsec-x/ID/user/pids.max=100",
		"/v2/dsec-x/ID/user/cgroup.max.depth=1", "/v2/dsec-x/ID/user/cgroup.max.descendants=356", "/v2/dsec-x/ID/user/cpu.max=150000 100000",
	}
	if got := flatten(p, id); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if len(p.cgroups.V1User) != 0 {
		t.Error("v1 groups on a v2 host")
	}
}

func TestPlanHybrid(t *testing.T) {
	id := sandbox.NewID("abcde")
	tree := testTree(Hybrid, 2)
	tree.memsw = true
	got := flatten(tree.plan(id, sandbox.Limits{Memory: 1 << 30, CPU: 64, PIDs: 100}), id)
	want := []string{
		"/v2/dsec-x/ID", "/v2/dsec-x/ID/aether", "/v2/dsec-x/ID/user",
		"/v2/dsec-x/ID/user/cgroup.max.depth=1", "/v2/dsec-x/ID/user/cgroup.max.descendants=356",
		"/memory/dsec-x/ID.aether", "/memory/dsec-x/ID.aether/memory.limit_in_bytes=67108864", "/memory/dsec-x/ID.aether/memory.memsw.limit_in_bytes=67112960",
		"/memory/dsec-x/ID.user", "/memory/dsec-x/ID.user/memory.limit_in_bytes=1073741824", "/memory/dsec-x/ID.user/memory.memsw.limit_in_bytes=1073745920",
		"/cpu/dsec-x/ID", "/cpu/dsec-x/ID/cpu.shares=65536", "/cpu/dsec-x/ID/aether", "/cpu/dsec-x/ID/aether/cpu.shares=65536",
		"/cpu/dsec-x/ID/user", // no quota: the node has no more CPUs
		"/pids/dsec-x/ID.aether", "/pids/dsec-x/ID.aether/pids.max=512", "/pids/dsec-x/ID", "/pids/dsec-x/ID/pids.max=101",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestAllSandboxesTogetherLeaveSomethingToTheHost(t *testing.T) {
	for _, c := range []struct{ host, want int64 }{{32768, 29492}, {4 << 20, 3774874}, {4096, 3072}, {1000, 500}} {
		if got := maxTasks(c.host); got != c.want {
			t.Errorf("of %d threads %d, want %d", c.host, got, c.want)
		}
	}
	for _, c := range []struct{ host, want int64 }{{100 << 30, 95 << 30}, {1 << 30, 768 << 20}, {256 << 20, 128 << 20}} {
		if got := maxMemory(c.host); got != c.want {
			t.Errorf("of %d bytes %d, want %d", c.host, got, c.want)
		}
	}
	for mode, want := range map[Mode][]string{
		V2:     {"/v2/dsec-x", "/v2/dsec-x/pids.max=9", "/v2/dsec-x/memory.max=4096"},
		Hybrid: {"/pids/dsec-x", "/pids/dsec-x/pids.max=9", "/memory/dsec-x", "/memory/dsec-x/memory.limit_in_bytes=4096"},
	} {
		if got := flatten(plan{groups: testTree(mode, 2).baseSettings(9, 4096)}, "no id"); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", mode, got, want)
		}
	}
}

func TestCPUFigures(t *testing.T) {
	tree := testTree(V2, 4)
	for _, c := range []struct {
		cores  float64
		quota  int64
		shares int64
		mask   int // number of CPUs; 0 = all
	}{
		{0.001, 1000, 2, 1}, {0.01, 1000, 10, 1}, {0.5, 50_000, 512, 1}, {1, 100_000, 1024, 1}, {1.01, 101_000, 1034, 2}, {3.5, 350_000, 3584, 0}, {4, 0, 4096, 0}, {4096, 0, maxShares, 0},
	} {
		q, s, m := tree.quota(c.cores), scale(c.cores, sharesPerCore, minShares, maxShares), tree.mask(c.cores)
		if q != c.quota || s != c.shares || len(m) != c.mask {
			t.Errorf("%v cores: quota %d, shares %d, mask %v; want %d, %d, %d CPUs", c.cores, q, s, m, c.quota, c.shares, c.mask)
		}
	}
}

func TestMasksRotateOverAllCPUs(t *testing.T) {
	tree := testTree(V2, 3)
	tree.cpus = []int{1, 4, 7}
	var got [][]int
	for range 3 {
		got = append(got, tree.mask(2))
	}
	if want := [][]int{{1, 4}, {1, 7}, {4, 7}}; !reflect.DeepEqual(got, want) {
		t.Errorf("masks %v, want %v", got, want)
	}
}

func TestOwnV2(t *testing.T) {
	for in, want := range map[string]string{
		"0::/\n": "/", "4:memory:/x\n0::/system.slice/dsec.service\n": "/system.slice/dsec.service", "0::/a (deleted)\n": "/a",
	} {
		if got, err := ownV2([]byte(in)); got != want || err != nil {
			t.Errorf("%q gives %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "4:memory:/\n", "0::/../other\n", "0::x\n"} {
		if got, err := ownV2([]byte(in)); err == nil {
			t.Errorf("%q gives %q", in, got)
		}
	}
}

func TestParseFlat(t *testing.T) {
	const oomControl = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"
	if n, err := parseFlat([]byte(oomControl), "oom_kill"); n != 7 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
	for _, bad := range []string{"", "oom_kill\n", "oom_kill x\n", "oom_kill -1\n", "oom_kill_disable 0\n", "oom_kill 99999999999999999999\n"} {
		if n, err := parseFlat([]byte(bad), "oom_kill"); err == nil {
			t.Errorf("%q gives %d", bad, n)
		}
	}
}

func TestParsePids(t *testing.T) {
	if got, err := parsePids([]byte("12\n0\n7\n")); !slices.Equal(got, []int{12, 7}) || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"x", "-4", "4294967297"} {
		if got, err := parsePids([]byte(bad)); err == nil {
			t.Errorf("%q gives %v", bad, got)
		}
	}
}

func TestRetryGrowsItsPausesAndEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), sandbox.StoppingDeadline)
		defer cancel()
		tries := 0
		err := retry(ctx, func() (bool, error) { tries++; return false, nil })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if tries < 1000 || tries > 4000 {
			t.Errorf("%d tries in %v", tries, sandbox.StoppingDeadline)
		}
		if err := retry(ctx, func() (bool, error) { return true, nil }); err != nil {
			t.Errorf("done at the first try, but: %v", err)
		}
	})
}

func TestOnADirectoryThatIsNoCgroupNothingSeemsToWork(t *testing.T) {
	tree := testTree(V2, 2)
	tree.v2 = t.TempDir()
	id := sandbox.NewID("abcde")
	if _, err := tree.Create(t.Context(), id, sandbox.Limits{Memory: 1 << 30, CPU: 1, PIDs: 10}); err == nil {
		t.Error("limits were set on an ordinary directory")
	}
	entries, err := os.ReadDir(tree.v2)
	if err != nil || len(entries) != 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

func TestOpenRefusesNamesThatArePaths(t *testing.T) {
	for _, name := range []string{"", "..", "a/b", "A", strings.Repeat("a", 64)} {
		if _, err := Open(t.Context(), Options{Name: name}); sandbox.ClassOf(err) != sandbox.InvalidArgument {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func FuzzParsers(f *testing.F) {
	f.Add([]byte("populated 1\nfrozen 0\n"))
	f.Add([]byte("1\n2\n3\n"))
	f.Add([]byte("0::/a/../b\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := parseFlat(b, "populated"); err == nil && n < 0 {
			t.Errorf("negative count %d", n)
		}
		if pids, err := parsePids(b); err == nil {
			for _, p := range pids {
				if p <= 0 {
					t.Errorf("pid %d", p)
				}
			}
		}
		if path, err := ownV2(b); err == nil && (!strings.HasPrefix(path, "/") || slices.Contains(strings.Split(path, "/"), "..")) {
			t.Errorf("path %q", path)
		}
	})
}
