package policy

import (
	"slices"
	"strings"
	"testing"
)

func TestCapabilities(t *testing.T) {
	if got := CommandCapabilities(); got != 0xa80405fb&^(1<<13) {
		t.Errorf("commands have %#x: Docker's are 0xa80425fb, less NET_RAW (1<<13)", got)
	}
	more := GuestCapabilities() &^ CommandCapabilities()
	if names := CapabilityNames(more); !slices.Equal(names, []string{"CAP_SYS_RESOURCE"}) {
		t.Errorf("aether has more than one capability more: %v", names)
	}
	if n := len(CapabilityNames(CommandCapabilities())); n != len(commandCapabilities) {
		t.Errorf("%d capabilities of %d have a number", n, len(commandCapabilities))
	}
}

// stage mounts over these paths below a fresh /proc without looking where they lead.
func TestPathsAreBelowProc(t *testing.T) {
	for _, p := range append(Masked(), ReadOnly()...) {
		if !strings.HasPrefix(p, "/proc/") || strings.Contains(p, "..") || strings.HasPrefix(p, "/proc/self") {
			t.Errorf("%s cannot be masked", p)
		}
	}
}
