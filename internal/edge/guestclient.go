package edge

import (
	"context"
	"time"

	"dsec/internal/edge/guest"
	"dsec/sandbox"
)

// ConnectAether is the ConnectGuest of real sandboxes.
func ConnectAether(ctx context.Context, o GuestOptions) (Guest, error) {
	c, err := guest.Connect(ctx, o)
	if err != nil {
		return nil, err
	}
	return guestClient{c}, nil
}

// EndedAether is the EndedGuest of real sandboxes.
func EndedAether(o GuestOptions) (Guest, error) {
	c, err := guest.Ended(o)
	if err != nil {
		return nil, err
	}
	return guestClient{c}, nil
}

// guestClient is a guest.Client whose commands are interfaces.
type guestClient struct{ *guest.Client }

func (g guestClient) Start(ctx context.Context, id string, cmd sandbox.Command) (GuestCommand, error) {
	c, err := g.Client.Start(ctx, id, cmd)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (g guestClient) Dial(ctx context.Context, host string, port int, timeout time.Duration) (GuestConn, error) {
	c, err := g.Client.Dial(ctx, host, port, timeout)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (g guestClient) Command(id string) (GuestCommand, bool) {
	c, ok := g.Client.Command(id)
	if !ok {
		return nil, false
	}
	return c, true
}

func (g guestClient) Commands() []GuestCommand {
	all := g.Client.Commands()
	out := make([]GuestCommand, len(all))
	for i, c := range all {
		out[i] = c
	}
	return out
}

func (g guestClient) ReadArchive(ctx context.Context, a ArchiveRead) (GuestArchive, error) {
	r, err := g.Client.ReadArchive(ctx, a)
	if err != nil {
		return nil, err
	}
	return r, nil
}
