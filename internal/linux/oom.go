package linux

import (
	"os"
	"strconv"
)

// sparedScore makes the OOM killer choose nearly everything else first. Not -1000, which is never: what grows without end
// must end.
const sparedScore = "-900"

// SpareFromOOM makes the kernel's OOM killer choose this process last. Children inherit that: see ChooseInOOM.
func SpareFromOOM() error { return setOOMScore(os.Getpid(), sparedScore) }

// ChooseInOOM takes from a process what it inherited of SpareFromOOM, for good: without a capability over the host it cannot
// get it back.
func ChooseInOOM(pid int) error { return setOOMScore(pid, "0") }

func setOOMScore(pid int, score string) error {
	return WriteControl("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", score)
}
