package storetest

import (
	"testing"

	"dsec/internal/image/store"
)

func TestMemory(t *testing.T) {
	Run(t, func(*testing.T) store.Store { return NewMemory() },
		func(_ *testing.T, st store.Store, digest string) { st.(*Memory).Damage(digest) })
}
