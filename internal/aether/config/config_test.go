package config

import (
	"bytes"
	"reflect"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	in := Config{Key: make([]byte, KeyLen), Hostname: "h", Env: map[string]string{"A": "1"}, Cgroup: CgroupHybrid, V1Tasks: 3, CPUs: []int{0, 5}}
	b, err := in.Encode()
	if err != nil {
		t.Fatal(err)
	}
	out, err := Decode(bytes.NewReader(append(b, "more"...)))
	if err != nil || !reflect.DeepEqual(in, out) {
		t.Errorf("%+v, %v", out, err)
	}
	for n := range b {
		if _, err := Decode(bytes.NewReader(b[:n])); err == nil {
			t.Errorf("%d of %d bytes pass", n, len(b))
		}
	}
}

func TestValidate(t *testing.T) {
	good := Config{Key: make([]byte, KeyLen), Cgroup: CgroupHybrid}
	for name, change := range map[string]func(*Config){
		"short key":   func(c *Config) { c.Key = c.Key[1:] },
		"mode":        func(c *Config) { c.Cgroup = "" },
		"many tasks":  func(c *Config) { c.V1Tasks = 17 },
		"tasks in v2": func(c *Config) { c.Cgroup, c.V1Tasks = CgroupV2, 1 },
		"cpu":         func(c *Config) { c.CPUs = []int{-1} },
	} {
		c := good
		change(&c)
		if _, err := c.Encode(); err == nil {
			t.Errorf("%s passes", name)
		}
	}
}

func FuzzDecode(f *testing.F) {
	b, err := Config{Key: make([]byte, KeyLen), Cgroup: CgroupNone}.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		if c, err := Decode(bytes.NewReader(in)); err == nil && c.Validate() != nil {
			t.Errorf("%+v", c)
		}
	})
}
