package main

import "testing"

func TestLimitsOfTheHost(t *testing.T) {
	all := checkLimits()
	if len(all) != 3 {
		t.Fatalf("%+v", all)
	}
	for _, f := range all {
		if f.Verdict == verdictFail || f.Detail == "" {
			t.Errorf("%+v", f)
		}
	}
	got := limitFindings(limit{"a", "enough", "raise it", 10, 10}, limit{"b", "few", "raise it", 9, 10})
	if got[0].Verdict != verdictOK || got[0].Advice != "" || got[1].Verdict != verdictWarn || got[1].Advice != "raise it" {
		t.Errorf("%+v", got)
	}
}
