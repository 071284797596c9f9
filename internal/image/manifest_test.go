package image

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"dsec/sandbox"
)

func sample() Manifest {
	blob := func(c string) Blob { return Blob{Digest: DigestPrefix + strings.Repeat(c, 64), Size: 8192} }
	return Manifest{
		Version: 1, Kind: KindBase, Layers: []Layer{{Metadata: blob("a"), Data: []Blob{blob("b"), blob("c")}}, {Metadata: blob("d")}},
		Config:  Config{Env: map[string]string{"PATH": "/bin", "A": "<\u2028>"}, User: "app:app", Workdir: "/srv"},
		Entries: 3, FileBytes: 7, Dropped: []string{"dev/null"},
	}
}

func TestManifestRoundTrip(t *testing.T) {
	m := sample()
	m.Drop("bad \xff name " + strings.Repeat("x", 1000))
	b, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeManifest(b)
	if err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("got %v, %v", got, err)
	}
	for range 10 {
		if again, _ := got.Encode(); !bytes.Equal(again, b) {
			t.Fatal("not canonical")
		}
	}
}

func TestManifestRefused(t *testing.T) {
	for what, change := range map[string]func(*Manifest){
		"version 0":    func(m *Manifest) { m.Version = 0 },
		"kind":         func(m *Manifest) { m.Kind = "disk" },
		"no layers":    func(m *Manifest) { m.Layers = nil },
		"many layers":  func(m *Manifest) { m.Layers = make([]Layer, MaxLayers+1) },
		"many blobs":   func(m *Manifest) { m.Layers[0].Data = make([]Blob, MaxBlobs+1) },
		"path":         func(m *Manifest) { m.Layers[0].Metadata.Digest = "sha256:../../etc/passwd" },
		"no size":      func(m *Manifest) { m.Layers[0].Data[1].Size = 0 },
		"odd size":     func(m *Manifest) { m.Layers[0].Metadata.Size = 4097 },
		"counts":       func(m *Manifest) { m.Entries = -1 },
		"many dropped": func(m *Manifest) { m.Dropped = make([]string, MaxDropped+1) },
		"env name":     func(m *Manifest) { m.Config.Env["A=B"] = "" },
		"env UTF-8":    func(m *Manifest) { m.Config.Env["A"] = "\xff" },
		"workdir":      func(m *Manifest) { m.Config.Workdir = "srv" },
		"user":         func(m *Manifest) { m.Config.User = "a b" },
		"dropped":      func(m *Manifest) { m.Dropped[0] = "\xff" },
	} {
		m := sample()
		change(&m)
		if _, err := m.Encode(); sandbox.ClassOf(err) != sandbox.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	b, err := sample().Encode()
	if err != nil {
		t.Fatal(err)
	}
	s := string(b)
	for what, c := range map[string]struct{ in, reason string }{
		"empty":         {"", "invalid_manifest"},
		"null":          {"null", "invalid_manifest"},
		"cut":           {s[:len(s)-1], "invalid_manifest"},
		"trailing":      {s + "{}", "invalid_manifest"},
		"white space":   {s + "\n", "invalid_manifest"},
		"unknown field": {strings.Replace(s, `"kind"`, `"extra":1,"kind"`, 1), "invalid_manifest"},
		"other case":    {strings.Replace(s, `"kind"`, `"KIND"`, 1), "invalid_manifest"},
		"twice":         {strings.Replace(s, `"kind"`, `"kind":"base","kind"`, 1), "invalid_manifest"},
		"later version": {strings.Replace(s, `"version":1`, `"version":2,"new":{}`, 1), "manifest_version"},
		"huge":          {s[:len(s)-1] + strings.Repeat(" ", MaxManifest) + "}", "invalid_manifest"},
	} {
		if _, err := DecodeManifest([]byte(c.in)); sandbox.ReasonOf(err) != c.reason {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestDropIsBounded(t *testing.T) {
	var m Manifest
	for range 2 * MaxDropped {
		m.Drop("x")
	}
	if len(m.Dropped) != MaxDropped {
		t.Errorf("%d", len(m.Dropped))
	}
}

func FuzzDecodeManifest(f *testing.F) {
	b, err := sample().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":1,"kind":"base","layers":[{"metadata":{"digest":"","size":0},"data":null}],"config":{},"entries":0,"file_bytes":0}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeManifest(b)
		if err != nil {
			return
		}
		if again, err := m.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%q was taken for %q, %v", b, again, err)
		}
	})
}
