package network

import (
	"testing"

	"dsec/internal/edge/driver"
)

func TestParseDev(t *testing.T) {
	const heads = "Inter-|   Receive    |  Transmit\n face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n"
	const lo = "    lo:    9999       99    0    0    0     0          0         0     9999       99    0    0    0     0       0          0\n"
	got, err := parseDev(heads + lo + "  eth0: 100 2 0 0 0 0 0 0 30 4 0 0 0 0 0 0\n  eth1:1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n")
	if err != nil || got != (driver.Traffic{RxBytes: 101, RxPackets: 3, TxBytes: 31, TxPackets: 5}) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := parseDev(heads + lo); err != nil || got != (driver.Traffic{}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"eth0: 1 2 3\n", "eth0: x 2 0 0 0 0 0 0 30 4 0 0 0 0 0 0\n"} {
		if got, err := parseDev(heads + bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}
