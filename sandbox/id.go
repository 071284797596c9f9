package sandbox

import (
	"crypto/rand"
	"fmt"
	"io"
)

// An ID names one sandbox for ever. It matches ^[a-z][a-z0-9]{19,31}$, since it becomes host names, paths and cgroups:
//
//	kind letter | 5-character edge code | 16 characters = 80 random bits | 2 check characters
//
// Any apiserver routes by the id alone. A sandbox that moves to another edge gets a new one.
type ID string

// Kinds of ids.
const KindSandbox = 's'

const (
	idAlphabet  = "abcdefghijklmnopqrstuvwxyz234567" // base32, lower case
	edgeCodeLen = 5
	randomLen   = 16
	idLen       = 1 + edgeCodeLen + randomLen + 2
)

// An EdgeCode is given to an edge when it joins and is never reused: [a-z][a-z2-7]{4}.
type EdgeCode string

// Valid reports whether c has the form of an edge code.
func (c EdgeCode) Valid() bool {
	if len(c) != edgeCodeLen || c[0] < 'a' || c[0] > 'z' {
		return false
	}
	return inAlphabet(string(c))
}

// NewEdgeCode makes a random edge code.
func NewEdgeCode() EdgeCode {
	var b [edgeCodeLen]byte
	mustRead(b[:])
	out := make([]byte, edgeCodeLen)
	for i, v := range b {
		out[i] = idAlphabet[v&31]
	}
	out[0] = idAlphabet[b[0]%26]
	return EdgeCode(out)
}

// NewID makes an id of a sandbox on that edge.
func NewID(edge EdgeCode) ID {
	var b [randomLen]byte
	mustRead(b[:])
	out := make([]byte, 0, idLen)
	out = append(out, KindSandbox)
	out = append(out, edge...)
	for _, v := range b {
		out = append(out, idAlphabet[v&31])
	}
	return ID(append(out, checksum(out)...))
}

// ParseID checks form and checksum. Every id from outside goes through it before it becomes a path.
func ParseID(s string) (ID, error) {
	if len(s) != idLen || s[0] != KindSandbox || !EdgeCode(s[1:1+edgeCodeLen]).Valid() || !inAlphabet(s[1:]) {
		return "", Errorf(InvalidArgument, "bad_id", "%q is not a sandbox id", clip(s))
	}
	if body := s[:idLen-2]; string(checksum([]byte(body))) != s[idLen-2:] {
		return "", Errorf(InvalidArgument, "bad_id", "sandbox id %q has a typing error: its check characters do not match", s)
	}
	return ID(s), nil
}

// Edge is the code of the edge that owns the sandbox.
func (id ID) Edge() EdgeCode {
	if len(id) != idLen {
		return ""
	}
	return EdgeCode(id[1 : 1+edgeCodeLen])
}

// checksum is ten bits of a polynomial hash modulo a prime: it catches each single wrong character and each swap of
// neighbours.
func checksum(b []byte) []byte {
	const prime, radix = 1021, 33
	h := 0
	for _, c := range b {
		h = (h*radix + int(c)) % prime
	}
	return []byte{idAlphabet[h>>5], idAlphabet[h&31]}
}

func inAlphabet(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	return true
}

func mustRead(b []byte) {
	if _, err := io.ReadFull(rand.Reader, b); err != nil {
		panic(fmt.Sprintf("no randomness: %v", err)) // crypto/rand never fails on Linux
	}
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}
