package aether

import (
	"context"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
)

// A call is a unary request of the edge on its way.
type call struct {
	s      *session
	stream uint32
	req    *aetherv1.Call
	ctx    context.Context
	stop   func()
}

func newCall(s *session, stream uint32, req *aetherv1.Call) *call {
	c := &call{s: s, stream: stream, req: req}
	c.ctx, c.stop = context.WithCancel(context.Background())
	return c
}

// No bytes belong to a call.
func (c *call) Data(uint8, uint64, []byte, wire.Flags) error { return wire.ErrProtocol }
func (c *call) Ack(uint8, uint64, bool) error                { return wire.ErrProtocol }
func (c *call) cancel()                                      { c.stop() }

func (c *call) run() *failure {
	defer c.stop()
	reply, err := c.serve()
	if err != nil {
		return asFailure("do it", err)
	}
	if reply == nil {
		reply = &aetherv1.Reply{}
	}
	c.s.post(wire.MsgReply, c.stream, reply)
	return nil
}

// serve does what is asked; a nil Reply stands for an empty one.
func (c *call) serve() (*aetherv1.Reply, error) {
	switch r := c.req.Call.(type) {
	case *aetherv1.Call_ListProcesses:
		return c.s.srv.listProcesses(r.ListProcesses)
	case *aetherv1.Call_SignalProcess:
		return nil, signalProcess(r.SignalProcess)
	case *aetherv1.Call_Resize:
		return nil, c.s.srv.resize(r.Resize)
	case *aetherv1.Call_StatFiles:
		results, err := c.s.srv.statFiles(c.ctx, r.StatFiles)
		return &aetherv1.Reply{Reply: &aetherv1.Reply_StatResults{StatResults: results}}, err
	case *aetherv1.Call_ChangeFiles:
		result, err := c.s.srv.changeFiles(c.ctx, r.ChangeFiles)
		return &aetherv1.Reply{Reply: &aetherv1.Reply_ChangeResult{ChangeResult: result}}, err
	case *aetherv1.Call_CreateSession:
		return c.s.srv.createSession(c.ctx, r.CreateSession)
	case *aetherv1.Call_ListSessions:
		return &aetherv1.Reply{Reply: &aetherv1.Reply_Sessions{Sessions: c.s.srv.listSessions()}}, nil
	case *aetherv1.Call_DeleteSession:
		return nil, c.s.srv.deleteSession(c.ctx, r.DeleteSession.GetName())
	default:
		return nil, failf(aetherv1.Code_CODE_INVALID, "this aether does not know the request")
	}
}
