package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"dsec/client"
)

const jsonHelp = "print JSON"

// jsonFlag adds --json, which every command has: its errors are JSON then, too.
func jsonFlag(f *flagSet, to *bool, usage string) { f.BoolVar(to, "json", false, usage) }

// encode is v as one line of JSON; messages are written as the API writes them, zero values included.
func encode(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return json.Marshal(v)
	}
	raw, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding JSON: %w", err)
	}
	var line bytes.Buffer // protojson varies its white space on purpose
	if err := json.Compact(&line, raw); err != nil {
		return nil, fmt.Errorf("encoding JSON: %w", err)
	}
	return line.Bytes(), nil
}

// printJSON writes v as one line.
func (c *console) printJSON(v any) error {
	line, err := encode(v)
	if err != nil {
		return err
	}
	return c.print("%s\n", line)
}

// print writes to stdout; its error says that nobody reads any more.
func (c *console) print(format string, args ...any) error {
	if _, err := fmt.Fprintf(c.stdout, format, args...); err != nil {
		return &client.WriteError{Err: err}
	}
	return nil
}

// A table aligns columns for people. Cells may come from other users: they are made printable.
type table struct {
	buf bytes.Buffer
	w   *tabwriter.Writer
}

func newTable(header ...string) *table {
	t := &table{}
	t.w = tabwriter.NewWriter(&t.buf, 0, 0, 3, ' ', 0)
	if len(header) > 0 {
		t.row(header...)
	}
	return t
}

func (t *table) row(cells ...string) {
	clean := make([]string, len(cells))
	for i, cell := range cells {
		clean[i] = printable(cell)
	}
	fmt.Fprintln(t.w, strings.Join(clean, "\t"))
}

// print writes the table without blanks at the ends of lines.
func (t *table) print(c *console) error {
	t.w.Flush()
	var out strings.Builder
	for line := range strings.Lines(t.buf.String()) {
		out.WriteString(strings.TrimRight(line, " \n"))
		out.WriteByte('\n')
	}
	return c.print("%s", out.String())
}

// printable replaces what could drive a terminal or break a line.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

// escaped shows the name of a file so that no two look the same, whatever their bytes are: \n, \xff, and \\ for a backslash.
func escaped(name string) string {
	quoted := strconv.Quote(name)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// clipText shortens foreign text.
func clipText(s string) string {
	const most = 200
	if s = printable(s); len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// isTerminal reports whether w is a terminal, or another character device, where progress may be drawn.
func isTerminal(w io.Writer) bool {
	if l, ok := w.(*lockedWriter); ok {
		w = l.to
	}
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// age is how long ago t was, as docker says it.
func age(now time.Time, t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	d := now.Sub(t.AsTime())
	for _, u := range []struct {
		size time.Duration
		name string
	}{{24 * time.Hour, "day"}, {time.Hour, "hour"}, {time.Minute, "minute"}, {time.Second, "second"}} {
		if n := int64(d / u.size); n > 1 {
			return fmt.Sprintf("%d %ss ago", n, u.name)
		} else if n == 1 {
			return "1 " + u.name + " ago"
		}
	}
	return "now"
}

// byteSize is n in the unit that reads best.
func byteSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 999.5 && i < len(units)-1 {
		v /= 1024
		i++
	}
	return fmt.Sprintf("%.3g %ciB", v, units[i])
}

// pour copies to stdout; a failure of it is a *client.WriteError.
func (c *console) pour(from io.Reader) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, werr := c.stdout.Write(buf[:n]); werr != nil {
				return &client.WriteError{Err: werr}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.EPIPE)
}
