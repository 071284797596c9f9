package network

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"dsec/internal/linux"
)

// counters are what a process inside a slot can see of what happened in it before. They are comparable.
type counters struct {
	sockets   int    // of every family
	timeWait  int    // TCP connections that are closed but remembered for a minute
	protocols string // contents of the files in stateFiles
}

// stateFiles hold the counters of interfaces and protocols, below /proc/<thread>/net, and the flow labels: one that lingers
// outlives its socket, and making it counts nowhere.
var stateFiles = []string{"dev", "snmp", "netstat", "snmp6", "ip6_flowlabel"}

func (c counters) quiescent() bool { return c.sockets == 0 && c.timeWait == 0 }

// readCounters inspects the network namespace kept at path.
func readCounters(path string) (counters, error) {
	var c counters
	err := linux.InNetns(path, func() (err error) {
		c, err = readCountersHere()
		return err
	})
	return c, err
}

func readCountersHere() (counters, error) {
	const dir = "/proc/thread-self/net/"
	stat, err := os.ReadFile(dir + "sockstat")
	if err != nil {
		return counters{}, err
	}
	c, err := parseSockstat(stat)
	if err != nil {
		return counters{}, err
	}
	var all bytes.Buffer
	for _, name := range stateFiles {
		b, err := os.ReadFile(dir + name)
		if err != nil && !os.IsNotExist(err) { // snmp6 and flow labels are missing where IPv6 is off
			return counters{}, err
		}
		all.Write(b)
	}
	c.protocols = all.String()
	return c, nil
}

// parseSockstat reads /proc/net/sockstat. Only two of its numbers belong to the namespace alone and cover everything: the sockets of
// all families, and tw. The memory figures are the whole machine's.
//
//	sockets: used 0
//	TCP: inuse 0 orphan 0 tw 0 alloc 3 mem 0
func parseSockstat(b []byte) (counters, error) {
	c := counters{sockets: -1, timeWait: -1}
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		for i := 1; i+1 < len(fields); i += 2 {
			n, err := strconv.Atoi(fields[i+1])
			if err != nil || n < 0 {
				return c, fmt.Errorf("sockstat: %q is not a count", fields[i+1])
			}
			switch fields[0] + fields[i] {
			case "sockets:used":
				c.sockets = n
			case "TCP:tw":
				c.timeWait = n
			}
		}
	}
	if c.sockets < 0 || c.timeWait < 0 {
		return c, fmt.Errorf("sockstat: no count of sockets or of tw")
	}
	return c, nil
}
