//go:build rootful

package container

import (
	"os/exec"
	"strings"
	"testing"
)

func TestRootStepNamesAreThoseOfStage(t *testing.T) {
	out, err := exec.Command(stageProgram(t), "steps").Output()
	must(t, err)
	if got, want := strings.Fields(string(out)), strings.Join(stepNames[:], " "); strings.Join(got, " ") != want {
		t.Errorf("stage has %v, want %v", got, want)
	}
}
