package network

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
)

// Traffic reads the counters of a sandbox's slot. They begin with the slot.
func (s *Slots) Traffic(n driver.Network) (driver.Traffic, error) {
	var t driver.Traffic
	err := linux.InNetns(n.Namespace, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/dev")
		if err != nil {
			return err
		}
		t, err = parseDev(string(b))
		return err
	})
	if err != nil {
		return driver.Traffic{}, fmt.Errorf("read the traffic of a slot: %w", err)
	}
	return t, nil
}

// parseDev adds up /proc/net/dev: two lines of heads, then "name: " and 16 numbers, of which the first two are bytes and packets
// received, the ninth and tenth those sent.
func parseDev(content string) (driver.Traffic, error) {
	var t driver.Traffic
	for line := range strings.Lines(content) {
		name, rest, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(name) == "lo" {
			continue
		}
		f := strings.Fields(rest)
		if len(f) < 16 {
			return driver.Traffic{}, fmt.Errorf("net/dev: %d numbers of %.20q", len(f), name)
		}
		for i, p := range map[int]*int64{0: &t.RxBytes, 1: &t.RxPackets, 8: &t.TxBytes, 9: &t.TxPackets} {
			n, err := strconv.ParseInt(f[i], 10, 64)
			if err != nil {
				return driver.Traffic{}, fmt.Errorf("net/dev: %w", err)
			}
			*p += n
		}
	}
	return t, nil
}
