package aether

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"strings"
	"sync"
)

// Files and trees are made under temporary names, and renamed once they are complete. Such a name proves that this process
// has made it, also after it is gone: a watch hears of it later, and what somebody inside calls alike is theirs. It says, too,
// whether something was at the target when the work began, which the kernel does not tell of a rename.
const (
	temporaryPrefix = ".dsec-"
	temporaryHalf   = 9 // bytes of chance, and as many that prove
)

// temporaryKey makes it impossible to give such a name to anything else, but by taking over one that was seen.
var temporaryKey = sync.OnceValue(func() (key [32]byte) {
	_, _ = rand.Read(key[:]) // never fails
	return key
})

var temporaryEncoding = base64.RawURLEncoding

// temporaryName is one that nobody has.
func temporaryName(replaces bool) string {
	var b [2 * temporaryHalf]byte
	_, _ = rand.Read(b[:temporaryHalf]) // never fails
	b[0] &^= 1
	if replaces {
		b[0] |= 1
	}
	proof := temporaryProof(b[:temporaryHalf])
	copy(b[temporaryHalf:], proof[:])
	return temporaryPrefix + temporaryEncoding.EncodeToString(b[:])
}

func temporaryProof(chance []byte) [sha256.Size]byte {
	key := temporaryKey()
	return sha256.Sum256(append(key[:], chance...))
}

// isTemporary says whether name is a temporary one of ours, and if it replaces something.
func isTemporary(name string) (ours, replaces bool) {
	text, found := strings.CutPrefix(name, temporaryPrefix)
	if !found || len(text) != temporaryEncoding.EncodedLen(2*temporaryHalf) {
		return false, false
	}
	b, err := temporaryEncoding.DecodeString(text)
	if err != nil {
		return false, false
	}
	proof := temporaryProof(b[:temporaryHalf])
	return string(b[temporaryHalf:]) == string(proof[:temporaryHalf]), b[0]&1 != 0
}
