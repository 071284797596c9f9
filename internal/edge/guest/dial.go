package guest

import (
	"context"
	"time"

	aetherv1 "dsec/api/aether/v1"
)

// Dial connects to a TCP port inside: on the loopback, or of host where that is given. The stream ends with ctx.
func (c *Client) Dial(ctx context.Context, host string, port int, timeout time.Duration) (*ByteStream, error) {
	req := &aetherv1.Dial{Host: host, Port: uint32(port), TimeoutMs: uint64(timeout.Milliseconds())}
	return c.open(ctx, &aetherv1.Open{Open: &aetherv1.Open_Dial{Dial: req}}, "port_refused", timeout+requestTimeout)
}
