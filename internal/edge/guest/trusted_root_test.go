//go:build rootful

package guest

import (
	"testing"

	"dsec/sandbox"
)

// Without a hand-over there are no trusted commands, and what aether is handed in vain is closed.
func TestRootTrustedNeedsGrounds(t *testing.T) {
	j := newJail(t)
	_, err := j.client.Start(t.Context(), "early", sandbox.Command{Shell: "id", Cwd: "/", Trusted: true})
	if e := sandbox.AsError(err); e.Reason != "no_trusted_tools" {
		t.Errorf("without tools: %v", err)
	}
}
