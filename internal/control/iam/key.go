package iam

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"dsec/internal/control/store"
)

const (
	keyPrefix = "dsec_"
	keyBytes  = 32
	keyLen    = len(keyPrefix) + 2*keyBytes
)

// A Key is the secret of a caller: "dsec_" and 64 hexadecimal digits. It prints, formats, logs and encodes as a placeholder;
// only Reveal gives it away, and only the place that hands it to its owner calls that.
type Key struct{ secret string }

const placeholder = keyPrefix + "[redacted]"

// Reveal is the key itself.
func (k Key) Reveal() string { return k.secret }

// String is a placeholder.
func (Key) String() string { return placeholder }

// Format prints a placeholder for every verb: %x and %#v would otherwise look inside.
func (Key) Format(f fmt.State, _ rune) { io.WriteString(f, placeholder) }

// LogValue is a placeholder.
func (Key) LogValue() slog.Value { return slog.StringValue(placeholder) }

// MarshalText is a placeholder, also within JSON.
func (Key) MarshalText() ([]byte, error) { return []byte(placeholder), nil }

func (k Key) hash() store.Hash { return sha256.Sum256([]byte(k.secret)) }

func newKey() (Key, error) {
	var b [keyBytes]byte
	if _, err := rand.Read(b[:]); err != nil {
		return Key{}, fmt.Errorf("make key: %w", err)
	}
	return Key{secret: keyPrefix + hex.EncodeToString(b[:])}, nil
}

// ParseKey checks the form. It says nothing of a malformed key but that it is malformed: it may be a near miss of a real one.
func ParseKey(s string) (Key, bool) {
	if len(s) != keyLen || s[:len(keyPrefix)] != keyPrefix {
		return Key{}, false
	}
	for _, c := range []byte(s[len(keyPrefix):]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return Key{}, false
		}
	}
	return Key{secret: s}, true
}

// bearer takes the key out of an Authorization header. The scheme's name has no case (RFC 9110).
func bearer(header string) (Key, bool) {
	scheme, rest, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return Key{}, false
	}
	return ParseKey(strings.TrimLeft(rest, " "))
}
