// Command hoststate prints what is on this host, one line a thing and sorted, so that a test can compare before and after:
// mounts, control groups, loop devices, links and namespaces of the network, processes, BPF objects, and the files below the
// directories given as arguments. It needs root.
package main

import (
	"fmt"
	"os"
	"sort"

	"dsec/internal/linux/hoststate"
)

func main() {
	state, err := hoststate.Snapshot(os.Args[1:]...)
	if err != nil {
		fmt.Fprintln(os.Stderr, "hoststate:", err)
		os.Exit(1)
	}
	var lines []string
	for item, n := range state {
		if item.Kind == hoststate.FD { // of this program
			continue
		}
		lines = append(lines, fmt.Sprintf("%s x%d", item, n))
	}
	sort.Strings(lines)
	for _, line := range lines {
		fmt.Println(line)
	}
}
