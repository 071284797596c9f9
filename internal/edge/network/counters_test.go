package network

import "testing"

const fresh = "sockets: used 0\nTCP: inuse 0 orphan 0 tw 0 alloc 3 mem 0\nUDP: inuse 0 mem 256\nRAW: inuse 0\nFRAG: inuse 0 memory 0\n"

func TestParseSockstat(t *testing.T) {
	cases := map[string]struct {
		in        string
		quiescent bool
		bad       bool
	}{
		"fresh":            {in: fresh, quiescent: true},
		"a socket":         {in: "sockets: used 1\nTCP: inuse 0 orphan 0 tw 0 alloc 3 mem 0\n"},
		"time wait":        {in: "sockets: used 0\nTCP: inuse 0 orphan 0 tw 2 alloc 3 mem 0\n"},
		"empty":            {in: "", bad: true},
		"no tw":            {in: "sockets: used 0\n", bad: true},
		"no sockets":       {in: "TCP: inuse 0 tw 0\n", bad: true},
		"not a number":     {in: "sockets: used x\nTCP: tw 0\n", bad: true},
		"a negative count": {in: "sockets: used -1\nTCP: tw 0\n", bad: true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := parseSockstat([]byte(c.in))
			if (err != nil) != c.bad {
				t.Fatalf("error %v", err)
			}
			if err == nil && got.quiescent() != c.quiescent {
				t.Errorf("quiescent %v, want %v", got.quiescent(), c.quiescent)
			}
		})
	}
}

func FuzzParseSockstat(f *testing.F) {
	f.Add([]byte(fresh))
	f.Add([]byte("sockets: used 99999999999999999999\n"))
	f.Add([]byte("TCP: tw"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseSockstat(b)
		if err == nil && (c.sockets < 0 || c.timeWait < 0) {
			t.Fatalf("accepted %+v", c)
		}
	})
}

func TestParseNumberTakesOnlyNamesOfSlots(t *testing.T) {
	for _, s := range []string{"", "-1", "01", "+1", "sysfs", "1x"} {
		if n, err := parseNumber(s); err == nil {
			t.Errorf("%q is slot %d", s, n)
		}
	}
	if n, err := parseNumber("17"); n != 17 || err != nil {
		t.Errorf("17 gives %d, %v", n, err)
	}
}
