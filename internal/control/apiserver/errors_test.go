package apiserver

import (
	"testing"

	"dsec/sandbox"
)

// The one table of codes is grpcerr's; its numbers must mean the same to Connect.
func TestEveryClassHasItsCode(t *testing.T) {
	for c := sandbox.Internal; c <= sandbox.DataLoss; c++ {
		if wireCode(c).String() != c.String() {
			t.Errorf("%s travels as %s", c, wireCode(c))
		}
	}
}
