package apiserver

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// Exec implements the service. It is the hot path: nothing of the command is looked at here; the edge validates it.
func (v sandboxService) Exec(ctx context.Context, r *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	id, e, signed, err := v.s.target(exchangeOf(ctx).who, r.Msg.GetSandboxId())
	if err != nil {
		return nil, err
	}
	res, err := e.Exec(ctx, signed, r.Msg)
	if err != nil {
		return nil, about(id, err)
	}
	return connect.NewResponse(&dsecv1.ExecResponse{Result: res}), nil
}

// GetCommand implements the service.
func (v sandboxService) GetCommand(ctx context.Context, r *connect.Request[dsecv1.GetCommandRequest]) (*connect.Response[dsecv1.GetCommandResponse], error) {
	id, e, signed, err := v.command(ctx, r.Msg.GetSandboxId(), r.Msg.GetCommandId())
	if err != nil {
		return nil, err
	}
	res, err := e.GetCommand(ctx, signed, r.Msg)
	if err != nil {
		return nil, about(id, err)
	}
	return connect.NewResponse(&dsecv1.GetCommandResponse{Result: res}), nil
}

// ListCommands implements the service.
func (v sandboxService) ListCommands(ctx context.Context, r *connect.Request[dsecv1.ListCommandsRequest]) (*connect.Response[dsecv1.ListCommandsResponse], error) {
	id, e, signed, err := v.s.target(exchangeOf(ctx).who, r.Msg.GetSandboxId())
	if err != nil {
		return nil, err
	}
	res, err := e.ListCommands(ctx, signed, r.Msg)
	if err != nil {
		return nil, about(id, err)
	}
	return connect.NewResponse(res), nil
}

// KillCommand implements the service.
func (v sandboxService) KillCommand(ctx context.Context, r *connect.Request[dsecv1.KillCommandRequest]) (*connect.Response[dsecv1.KillCommandResponse], error) {
	id, e, signed, err := v.command(ctx, r.Msg.GetSandboxId(), r.Msg.GetCommandId())
	if err != nil {
		return nil, err
	}
	res, err := e.KillCommand(ctx, signed, r.Msg)
	if err != nil {
		return nil, about(id, err)
	}
	return connect.NewResponse(res), nil
}

// command checks both names before anything is looked up.
func (v sandboxService) command(ctx context.Context, rawID, cmd string) (sandbox.ID, Edge, string, error) {
	if err := checkCommand(cmd); err != nil {
		return "", nil, "", err
	}
	return v.s.target(exchangeOf(ctx).who, rawID)
}

func checkCommand(cmd string) error {
	if !sandbox.ValidCommandID(cmd) {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_command_id", "a command id is 1 to 64 of letters, digits, _ and -")
	}
	return nil
}

// serveBytes passes a byte route to the sandbox's edge.
func (s *Server) serveBytes(w http.ResponseWriter, r *http.Request) {
	x := w.(*exchange)
	if cmd := r.PathValue("cmd"); cmd != "" {
		if err := checkCommand(cmd); err != nil {
			x.fail(r, err)
			return
		}
	}
	id, e, signed, err := s.target(x.who, r.PathValue("id"))
	if err != nil {
		x.fail(r, err)
		return
	}
	e.ServeBytes(x, r, signed, func(_ http.ResponseWriter, r *http.Request, err error) { x.fail(r, about(id, err)) })
}
