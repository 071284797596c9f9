// Package edgeclient is the control plane's side of one edge: creates in batches, unary calls, and byte streams.
//
// What surprises:
//
//   - While an edge is away, calls wait for it up to AwayTimeout, so that a restart is not seen by callers; after that they
//     fail with Unavailable (edge_unavailable). A call that was under way when the connection broke fails at once: only its
//     caller knows whether it may be sent again.
//   - An edge that is there but silent is given up by gRPC's keepalive. It pings only when nothing was read for a while, and
//     the watcher's polls are read on the same connection: an edge that answers is never pinged.
//   - A create that its caller gives up may still become a sandbox. Undoing that is the caller's business (package launch).
package edgeclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/internal/grant"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

// Defaults.
const (
	DefaultAwayTimeout = 5 * time.Second
	// MaxMessage bounds one message to or from an edge: an Exec carries a script of up to 16 MiB.
	MaxMessage = 24 << 20

	silence = 10 * time.Second // after which keepalive pings, and again until it gives up
)

// Options of a Client. Dial and DialBytes connect to the edge's gRPC and byte sockets.
type Options struct {
	Code        sandbox.EdgeCode
	Dial        func(context.Context) (net.Conn, error)
	DialBytes   func(context.Context) (net.Conn, error)
	AwayTimeout time.Duration // 0 = DefaultAwayTimeout
	Log         *slog.Logger
}

// A Client talks to one edge. It is safe for concurrent use.
type Client struct {
	o       Options
	conn    *grpc.ClientConn
	rpc     edgev1.EdgeServiceClient
	batches batcher
	bytes   *byteProxy
	close   func() error
}

// New makes a client. It connects when it is first needed, and again whenever the connection was lost.
func New(o Options) (*Client, error) {
	if o.AwayTimeout <= 0 {
		o.AwayTimeout = DefaultAwayTimeout
	}
	conn, err := grpc.NewClient("passthrough:///edge-"+string(o.Code),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // a Unix socket that only root can enter
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return o.Dial(ctx) }),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: 2 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: silence, Timeout: silence}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithNoProxy(),
	)
	if err != nil {
		return nil, fmt.Errorf("make client of edge %s: %w", o.Code, err)
	}
	c := &Client{o: o, conn: conn, rpc: edgev1.NewEdgeServiceClient(conn)}
	c.batches.init(c.sendBatch)
	c.bytes = newByteProxy(o.DialBytes)
	c.close = sync.OnceValue(c.shut)
	return c, nil
}

// Code is the edge's code.
func (c *Client) Code() sandbox.EdgeCode { return c.o.Code }

// Close ends every call and waits for batches in flight to notice. Closing twice is harmless.
func (c *Client) Close() error { return c.close() }

func (c *Client) shut() error {
	c.batches.close()
	c.bytes.close()
	if err := c.conn.Close(); err != nil {
		return fmt.Errorf("close connection to edge %s: %w", c.o.Code, err)
	}
	return nil
}

// SetDown tells the client what the watcher thinks. Going down ends byte streams in flight: they have no deadline of their
// own, and can be taken up again from their offsets.
func (c *Client) SetDown(down bool) { c.bytes.setDown(down) }

// ready waits for the connection, at most AwayTimeout or until ctx ends. A deadline that is shorter says the same of the edge:
// it is the edge that did not come, not the call that took long.
func (c *Client) ready(ctx context.Context) error {
	if c.conn.GetState() == connectivity.Ready {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, c.o.AwayTimeout)
	defer cancel()
	for {
		state := c.conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Idle:
			c.conn.Connect()
		case connectivity.Shutdown:
			return c.away(nil)
		}
		if !c.conn.WaitForStateChange(wait, state) {
			if errors.Is(ctx.Err(), context.Canceled) {
				return sandbox.AsError(ctx.Err())
			}
			return c.away(wait.Err())
		}
	}
}

func (c *Client) away(cause error) error {
	if e := sandbox.AsError(cause); e != nil && e.Reason == sandbox.ReasonNoDescriptors { // it is this process that cannot reach the edge
		return e
	}
	return sandbox.Errorf(sandbox.Unavailable, "edge_unavailable", "node %s does not answer; try again", c.o.Code).
		WithFact("node", string(c.o.Code)).WithCause(cause)
}

// failure is what a caller learns of a failed call. The end of the caller's own context counts first.
func failure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return sandbox.AsError(fmt.Errorf("%w: %w", ctx.Err(), err))
	}
	return grpcerr.FromStatus(err)
}

func call[Req, Res any](ctx context.Context, c *Client, signed string, req *Req, f func(context.Context, *Req, ...grpc.CallOption) (*Res, error)) (*Res, error) {
	var res *Res
	err := c.Call(ctx, signed, func(ctx context.Context, _ edgev1.EdgeServiceClient) (err error) {
		res, err = f(ctx, req)
		return err
	})
	return res, err
}

// GetSandbox passes through.
func (c *Client) GetSandbox(ctx context.Context, signed string, r *edgev1.GetSandboxRequest) (*dsecv1.Sandbox, error) {
	return call(ctx, c, signed, r, c.rpc.GetSandbox)
}

// ListSandboxes passes through.
func (c *Client) ListSandboxes(ctx context.Context, signed string, r *edgev1.ListSandboxesRequest) (*edgev1.ListSandboxesResponse, error) {
	return call(ctx, c, signed, r, c.rpc.ListSandboxes)
}

// DeleteSandbox passes through.
func (c *Client) DeleteSandbox(ctx context.Context, signed string, r *edgev1.DeleteSandboxRequest) (*dsecv1.Sandbox, error) {
	return call(ctx, c, signed, r, c.rpc.DeleteSandbox)
}

// Call makes one call of the contract, unary or a stream, within f. Its context carries the grant.
func (c *Client) Call(ctx context.Context, signed string, f func(context.Context, edgev1.EdgeServiceClient) error) error {
	if err := c.ready(ctx); err != nil {
		return err
	}
	if err := f(metadata.NewOutgoingContext(ctx, metadata.MD{grant.MetadataKey: {signed}}), c.rpc); err != nil {
		return failure(ctx, err)
	}
	return nil
}

// GetStatus asks for the edge's status.
func (c *Client) GetStatus(ctx context.Context, signed string) (*edgev1.Status, error) {
	return call(ctx, c, signed, &edgev1.GetStatusRequest{}, c.rpc.GetStatus)
}

// ServeBytes passes a request of a byte route to the edge and its answer back, without decoding. What the edge answers goes
// out as it is, errors too; onError writes the answer where the edge could not be asked.
func (c *Client) ServeBytes(w http.ResponseWriter, r *http.Request, signed string, onError func(http.ResponseWriter, *http.Request, error)) {
	if err := c.ready(r.Context()); err != nil {
		onError(w, r, err)
		return
	}
	c.bytes.serve(w, r, byteCall{signed: signed, onError: func(w http.ResponseWriter, r *http.Request, err error) {
		if r.Context().Err() == nil {
			err = c.away(err)
		}
		onError(w, r, err)
	}})
}
