package apiserver

import (
	"context"
	"errors"
	"io"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/grpc"

	dsecv1 "dsec/api/dsec/v1"
	edgev1 "dsec/api/edge/v1"
	"dsec/sandbox"
)

// What happens inside a sandbox is passed to its edge as it is: nothing of it is looked at here, the edge validates it.

// forSandbox is a request about one sandbox.
type forSandbox interface{ GetSandboxId() string }

// call is a unary call that the sandbox's edge answers. A name of a command is checked before anything is looked up.
func call[Req, Res any](ctx context.Context, s *Server, r *Req, f func(edgev1.EdgeServiceClient, context.Context, *Req, ...grpc.CallOption) (*Res, error)) (*Res, error) {
	id, e, signed, err := s.targetOf(ctx, any(r).(forSandbox))
	if err != nil {
		return nil, err
	}
	var res *Res
	err = e.Call(ctx, signed, func(ctx context.Context, c edgev1.EdgeServiceClient) (err error) {
		res, err = f(c, ctx, r)
		return err
	})
	if err != nil {
		return nil, about(id, err)
	}
	return res, nil
}

func unary[Req, Res any](ctx context.Context, s *Server, r *connect.Request[Req], f func(edgev1.EdgeServiceClient, context.Context, *Req, ...grpc.CallOption) (*Res, error)) (*connect.Response[Res], error) {
	res, err := call(ctx, s, r.Msg, f)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// stream passes on what the edge sends, message by message.
func stream[Req, Res any](ctx context.Context, s *Server, r *connect.Request[Req], out *connect.ServerStream[Res], f func(edgev1.EdgeServiceClient, context.Context, *Req, ...grpc.CallOption) (grpc.ServerStreamingClient[Res], error)) error {
	id, e, signed, err := s.targetOf(ctx, any(r.Msg).(forSandbox))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // or the edge would go on for a caller that has left
	return about(id, e.Call(ctx, signed, func(ctx context.Context, c edgev1.EdgeServiceClient) error {
		in, err := f(c, ctx, r.Msg)
		if err != nil {
			return err
		}
		for {
			m, err := in.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil {
				err = out.Send(m)
			}
			if err != nil {
				return err
			}
		}
	}))
}

func (s *Server) targetOf(ctx context.Context, r forSandbox) (sandbox.ID, Edge, string, error) {
	if c, ok := r.(interface{ GetCommandId() string }); ok {
		_, mayBeEmpty := r.(*dsecv1.ExecRequest)
		if err := checkCommand(c.GetCommandId()); err != nil && !(mayBeEmpty && c.GetCommandId() == "") {
			return "", nil, "", err
		}
	}
	return s.target(exchangeOf(ctx).who, r.GetSandboxId())
}

func checkCommand(cmd string) error {
	if !sandbox.ValidCommandID(cmd) {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_command_id", "a command id is 1 to 64 of letters, digits, _ and -")
	}
	return nil
}

// Exec implements the service.
func (v sandboxService) Exec(ctx context.Context, r *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	res, err := call(ctx, v.s, r.Msg, edgev1.EdgeServiceClient.Exec)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ExecResponse{Result: res}), nil
}

// GetCommand implements the service.
func (v sandboxService) GetCommand(ctx context.Context, r *connect.Request[dsecv1.GetCommandRequest]) (*connect.Response[dsecv1.GetCommandResponse], error) {
	res, err := call(ctx, v.s, r.Msg, edgev1.EdgeServiceClient.GetCommand)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetCommandResponse{Result: res}), nil
}

// ListCommands implements the service.
func (v sandboxService) ListCommands(ctx context.Context, r *connect.Request[dsecv1.ListCommandsRequest]) (*connect.Response[dsecv1.ListCommandsResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.ListCommands)
}

// KillCommand implements the service.
func (v sandboxService) KillCommand(ctx context.Context, r *connect.Request[dsecv1.KillCommandRequest]) (*connect.Response[dsecv1.KillCommandResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.KillCommand)
}

// ResizeTerminal implements the service.
func (v sandboxService) ResizeTerminal(ctx context.Context, r *connect.Request[dsecv1.ResizeTerminalRequest]) (*connect.Response[dsecv1.ResizeTerminalResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.ResizeTerminal)
}

// CreateSession implements the service.
func (v sandboxService) CreateSession(ctx context.Context, r *connect.Request[dsecv1.CreateSessionRequest]) (*connect.Response[dsecv1.CreateSessionResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.CreateSession)
}

// ListSessions implements the service.
func (v sandboxService) ListSessions(ctx context.Context, r *connect.Request[dsecv1.ListSessionsRequest]) (*connect.Response[dsecv1.ListSessionsResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.ListSessions)
}

// DeleteSession implements the service.
func (v sandboxService) DeleteSession(ctx context.Context, r *connect.Request[dsecv1.DeleteSessionRequest]) (*connect.Response[dsecv1.DeleteSessionResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.DeleteSession)
}

// StatFiles implements the service.
func (v sandboxService) StatFiles(ctx context.Context, r *connect.Request[dsecv1.StatFilesRequest]) (*connect.Response[dsecv1.StatFilesResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.StatFiles)
}

// ChangeFiles implements the service.
func (v sandboxService) ChangeFiles(ctx context.Context, r *connect.Request[dsecv1.ChangeFilesRequest]) (*connect.Response[dsecv1.ChangeFilesResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.ChangeFiles)
}

// GetMetrics implements the service.
func (v sandboxService) GetMetrics(ctx context.Context, r *connect.Request[dsecv1.GetMetricsRequest]) (*connect.Response[dsecv1.GetMetricsResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.GetMetrics)
}

// ListProcesses implements the service.
func (v sandboxService) ListProcesses(ctx context.Context, r *connect.Request[dsecv1.ListProcessesRequest]) (*connect.Response[dsecv1.ListProcessesResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.ListProcesses)
}

// SignalProcess implements the service.
func (v sandboxService) SignalProcess(ctx context.Context, r *connect.Request[dsecv1.SignalProcessRequest]) (*connect.Response[dsecv1.SignalProcessResponse], error) {
	return unary(ctx, v.s, r, edgev1.EdgeServiceClient.SignalProcess)
}

// ListFiles implements the service.
func (v sandboxService) ListFiles(ctx context.Context, r *connect.Request[dsecv1.ListFilesRequest], out *connect.ServerStream[dsecv1.ListFilesResponse]) error {
	return stream(ctx, v.s, r, out, edgev1.EdgeServiceClient.ListFiles)
}

// WatchFiles implements the service.
func (v sandboxService) WatchFiles(ctx context.Context, r *connect.Request[dsecv1.WatchFilesRequest], out *connect.ServerStream[dsecv1.WatchFilesResponse]) error {
	return stream(ctx, v.s, r, out, edgev1.EdgeServiceClient.WatchFiles)
}

// WatchMetrics implements the service.
func (v sandboxService) WatchMetrics(ctx context.Context, r *connect.Request[dsecv1.WatchMetricsRequest], out *connect.ServerStream[dsecv1.GetMetricsResponse]) error {
	return stream(ctx, v.s, r, out, edgev1.EdgeServiceClient.WatchMetrics)
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
