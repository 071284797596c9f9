package edge

import (
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

func TestTerminalsAndTags(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.create()
		start := func(name string, c *dsecv1.Command) error {
			time.Sleep(time.Millisecond) // the later ones are newer
			_, err := w.s.Exec(w.user(), &dsecv1.ExecRequest{SandboxId: string(id), CommandId: name, Command: c})
			return grpcerr.FromStatus(err)
		}
		for _, c := range []struct {
			name string
			c    *dsecv1.Command
		}{
			{"a1", &dsecv1.Command{Shell: "wait", Tag: "a"}},
			{"a2", &dsecv1.Command{Shell: "true", Tag: "a"}},
			{"b1", &dsecv1.Command{Shell: "wait", Tag: "b", Terminal: &dsecv1.Terminal{Cols: 7}}},
			{"a3", &dsecv1.Command{Shell: "wait", Tag: "a", NoOutputTimeoutSeconds: 1e300}},
		} {
			if err := start(c.name, c.c); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
		}
		synctest.Wait()
		for name, c := range map[string]*dsecv1.Command{
			"tag":             {Shell: "true", Tag: "a b"},
			"silence":         {Shell: "true", NoOutputTimeoutSeconds: -1},
			"NaN silence":     {Shell: "true", NoOutputTimeoutSeconds: math.NaN()},
			"rows":            {Shell: "true", Terminal: &dsecv1.Terminal{Rows: 65536}},
			"negative, as it": {Shell: "true", Terminal: &dsecv1.Terminal{Cols: math.MaxUint32}},
			"TERM":            {Shell: "true", Terminal: &dsecv1.Terminal{Term: "a b"}},
		} {
			if err := start("bad", c); sandbox.ClassOf(err) != sandbox.InvalidArgument {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, tc := range []struct {
			req  *dsecv1.ListCommandsRequest
			want []string
		}{
			{&dsecv1.ListCommandsRequest{}, []string{"a3", "b1", "a2", "a1"}},
			{&dsecv1.ListCommandsRequest{Tag: "a"}, []string{"a3", "a2", "a1"}},
			{&dsecv1.ListCommandsRequest{Tag: "a", Running: true}, []string{"a3", "a1"}},
			{&dsecv1.ListCommandsRequest{Tag: "c"}, nil},
			{&dsecv1.ListCommandsRequest{Session: "s"}, nil},
		} {
			tc.req.SandboxId = string(id)
			resp, err := w.s.ListCommands(w.user(), tc.req)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, c := range resp.Commands {
				got = append(got, c.CommandId)
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("%v: %v", tc.req, got)
			}
		}
		resize := func(command string) error {
			_, err := w.s.ResizeTerminal(w.user(), &dsecv1.ResizeTerminalRequest{SandboxId: string(id), CommandId: command, Rows: 10, Cols: 20})
			return grpcerr.FromStatus(err)
		}
		if err := resize("b1"); err != nil {
			t.Error(err)
		}
		if err := resize("a1"); sandbox.ReasonOf(err) != "no_terminal" {
			t.Errorf("%v", err)
		}
		if err := resize("none"); sandbox.ReasonOf(err) != "command_not_found" {
			t.Errorf("%v", err)
		}
		if _, err := w.s.ResizeTerminal(w.as("other", "user"), &dsecv1.ResizeTerminalRequest{SandboxId: string(id), CommandId: "b1", Rows: 1, Cols: 1}); sandbox.ClassOf(grpcerr.FromStatus(err)) != sandbox.NotFound {
			t.Errorf("of another project: %v", err)
		}
		w.close()
	})
}
