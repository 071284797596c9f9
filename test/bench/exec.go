package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"
)

// benchExec measures a command of a session through libdsec, against the same script in a shell of its own (run_shell), in turn.
func benchExec(ctx context.Context, s *session, r *report) error {
	p, err := s.startPlatform(ctx)
	if err != nil {
		return err
	}
	out, err := p.script(ctx, "sessions.py", "--image", image, "--rounds", strconv.Itoa(s.rounds), "--commands", strconv.Itoa(serialOps))
	if err != nil {
		return err
	}
	var inSession, inShell, p50, base samples
	for line := range bytes.Lines(out) {
		var round struct{ Session, Shell samples }
		if err := json.Unmarshal(line, &round); err != nil {
			return err
		}
		inSession, inShell = append(inSession, round.Session...), append(inShell, round.Shell...)
		p50, base = append(p50, round.Session.median()), append(base, round.Shell.median())
	}
	r.add(figure{Name: "session_p50", Value: p50.median(), Unit: "ms", Against: "run_shell", Baseline: base.median(), Others: inShell.spread(),
		Samples: len(inSession), Spread: inSession.spread(), Target: "<= 3 ms"}, true)
	return nil
}
