package edge

import (
	"cmp"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/internal/edge/guest"
	"dsec/internal/grpcerr"
	"dsec/sandbox"
)

const (
	maxPaths   = 10_000   // in one StatFiles
	maxChanges = 10_000   // in one ChangeFiles
	maxStats   = 16 << 20 // bytes of the answer to one StatFiles

	listBatch      = 512      // entries in one message of a listing
	listBatchBytes = 64 << 10 // or so
	// listStall is how long the reader of a listing may take nothing.
	listStall = 5 * time.Minute
	// watchAlive is how often a watch that has nothing to tell says that it is there.
	watchAlive = 15 * time.Second
)

// filePath is the path that a request gives, as text or raw.
func filePath(text string, raw []byte) (string, error) {
	if text != "" && len(raw) > 0 {
		return "", sandbox.Errorf(sandbox.InvalidArgument, "invalid_path", "a path is given twice, as text and raw")
	}
	p := text + string(raw)
	if p == "" || len(p) >= maxPathBytes || strings.ContainsRune(p, 0) {
		return "", sandbox.Errorf(sandbox.InvalidArgument, "invalid_path", "a path must have 1 to %d bytes and no NUL", maxPathBytes-1)
	}
	return p, nil
}

// filePaths are the paths of a request about many.
func filePaths(req *dsecv1.StatFilesRequest) ([]string, error) {
	n := len(req.GetPaths()) + len(req.GetRawPaths())
	if n > maxPaths {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "too_many_paths", "%d paths; at most %d in one request", n, maxPaths)
	}
	if len(req.GetPaths()) > 0 && len(req.GetRawPaths()) > 0 {
		return nil, sandbox.Errorf(sandbox.InvalidArgument, "invalid_path", "paths are given as text or raw, not some so and some so")
	}
	paths := make([]string, 0, n)
	add := func(text string, raw []byte) error {
		p, err := filePath(text, raw)
		paths = append(paths, p)
		return err
	}
	for _, p := range req.GetPaths() {
		if err := add(p, nil); err != nil {
			return nil, err
		}
	}
	for _, p := range req.GetRawPaths() {
		if err := add("", p); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

var fileTypes = map[uint32]dsecv1.FileType{
	0o100000: dsecv1.FileType_FILE_TYPE_REGULAR, 0o040000: dsecv1.FileType_FILE_TYPE_DIRECTORY, 0o120000: dsecv1.FileType_FILE_TYPE_SYMLINK,
	0o010000: dsecv1.FileType_FILE_TYPE_FIFO, 0o140000: dsecv1.FileType_FILE_TYPE_SOCKET,
	0o020000: dsecv1.FileType_FILE_TYPE_CHARACTER_DEVICE, 0o060000: dsecv1.FileType_FILE_TYPE_BLOCK_DEVICE,
}

// text puts a name into the field that can hold it: text, or raw where it is not UTF-8.
func text(name []byte) (string, []byte) {
	if utf8.Valid(name) {
		return string(name), nil
	}
	return "", name
}

func fileInfoOf(e FileEntry) *dsecv1.FileInfo {
	f := &dsecv1.FileInfo{
		Type: fileTypes[e.Mode&0o170000], Size: e.Size, Mode: e.Mode & 0o7777, Uid: e.UID, Gid: e.GID, ModifiedAt: timestamppb.New(e.MTime),
		AllocatedBytes: e.Blocks * 512, Links: e.Links, Inode: e.Inode,
	}
	f.Path, f.RawPath = text(e.Path)
	f.LinkTarget, f.RawLinkTarget = text(e.LinkTarget)
	return f
}

func (s *server) StatFiles(ctx context.Context, req *dsecv1.StatFilesRequest) (*dsecv1.StatFilesResponse, error) {
	res, err := s.statFiles(ctx, req)
	if err != nil {
		return nil, s.wire(ctx, "StatFiles", err)
	}
	return res, nil
}

func (s *server) statFiles(ctx context.Context, req *dsecv1.StatFilesRequest) (*dsecv1.StatFilesResponse, error) {
	in, g, err := s.guest(ctx, req.GetSandboxId())
	if err != nil {
		return nil, err
	}
	defer s.e.begin(in)()
	paths, err := filePaths(req)
	if err != nil {
		return nil, err
	}
	stats, err := g.StatFiles(ctx, in.userOf(req.GetUser()), paths, req.GetFollow())
	if err != nil {
		return nil, err
	}
	res := &dsecv1.StatFilesResponse{Results: make([]*dsecv1.StatResult, len(stats))}
	size := 0
	for i, st := range stats {
		r := &dsecv1.StatResult{}
		if st.Err != nil {
			r.Failure = grpcerr.ToFailure(about(in.id, st.Err))
			size += len(r.Failure.GetMessage()) + 64
		} else {
			st.Entry.Path = []byte(path.Join("/", paths[i]))
			r.File = fileInfoOf(st.Entry)
			size += len(st.Entry.Path) + len(st.Entry.LinkTarget) + 128
		}
		res.Results[i] = r
	}
	if size > maxStats {
		return nil, sandbox.Errorf(sandbox.ResourceExhausted, "answer_too_large", "the answer would be larger than %d MiB: ask for fewer paths at once", maxStats>>20)
	}
	return res, nil
}

func (s *server) ChangeFiles(ctx context.Context, req *dsecv1.ChangeFilesRequest) (*dsecv1.ChangeFilesResponse, error) {
	if err := s.changeFiles(ctx, req); err != nil {
		return nil, s.wire(ctx, "ChangeFiles", err)
	}
	return &dsecv1.ChangeFilesResponse{}, nil
}

func (s *server) changeFiles(ctx context.Context, req *dsecv1.ChangeFilesRequest) error {
	in, g, err := s.guest(ctx, req.GetSandboxId())
	if err != nil {
		return err
	}
	defer s.e.begin(in)()
	if n := len(req.GetChanges()); n > maxChanges {
		return sandbox.Errorf(sandbox.InvalidArgument, "too_many_changes", "%d changes; at most %d in one request", n, maxChanges)
	}
	changes := make([]FileChange, len(req.GetChanges()))
	for i, c := range req.GetChanges() { // all, before any is made
		if changes[i], err = changeOf(c); err != nil {
			return err
		}
	}
	return g.ChangeFiles(ctx, in.userOf(req.GetUser()), changes)
}

func changeOf(m *dsecv1.FileChange) (FileChange, error) {
	var c FileChange
	var err, errTo error
	switch m := m.GetChange().(type) {
	case *dsecv1.FileChange_MakeDirectory:
		d := m.MakeDirectory
		c = FileChange{Kind: guest.MakeDirectory, Mode: d.GetMode(), Recursive: d.GetParents()}
		c.Path, err = filePath(d.GetPath(), d.GetRawPath())
	case *dsecv1.FileChange_Move:
		c = FileChange{Kind: guest.MoveFile, Exclusive: m.Move.GetExclusive()}
		c.Path, err = filePath(m.Move.GetFrom(), m.Move.GetRawFrom())
		c.To, errTo = filePath(m.Move.GetTo(), m.Move.GetRawTo())
	case *dsecv1.FileChange_Copy:
		c = FileChange{Kind: guest.CopyFile, Recursive: m.Copy.GetRecursive(), Exclusive: m.Copy.GetExclusive()}
		c.Path, err = filePath(m.Copy.GetFrom(), m.Copy.GetRawFrom())
		c.To, errTo = filePath(m.Copy.GetTo(), m.Copy.GetRawTo())
	case *dsecv1.FileChange_Remove:
		c = FileChange{Kind: guest.RemoveFile, Recursive: m.Remove.GetRecursive(), MissingOK: m.Remove.GetMissingOk()}
		c.Path, err = filePath(m.Remove.GetPath(), m.Remove.GetRawPath())
	case *dsecv1.FileChange_SetMode:
		c = FileChange{Kind: guest.SetMode, Mode: m.SetMode.GetMode(), Recursive: m.SetMode.GetRecursive()}
		c.Path, err = filePath(m.SetMode.GetPath(), m.SetMode.GetRawPath())
	case *dsecv1.FileChange_SetOwner:
		c = FileChange{Kind: guest.SetOwner, Owner: m.SetOwner.GetOwner(), Recursive: m.SetOwner.GetRecursive()}
		c.Path, err = filePath(m.SetOwner.GetPath(), m.SetOwner.GetRawPath())
	case *dsecv1.FileChange_MakeLink:
		l := m.MakeLink
		c = FileChange{Kind: guest.MakeLink, Hard: l.GetHard()}
		c.Path, err = filePath(l.GetPath(), l.GetRawPath())
		c.To, errTo = filePath(l.GetTarget(), l.GetRawTarget())
	default:
		return c, sandbox.Errorf(sandbox.InvalidArgument, "invalid_change", "a change without a kind")
	}
	if c.Mode > 0o7777 {
		return c, sandbox.Errorf(sandbox.InvalidArgument, "invalid_mode", "mode %o is not one of permissions", c.Mode)
	}
	if len(c.Owner) > 256 || (c.Kind == guest.SetOwner && c.Owner == "") {
		return c, sandbox.Errorf(sandbox.InvalidArgument, "invalid_owner", "an owner has 1 to 256 bytes: a name, a uid, or user:group")
	}
	return c, cmp.Or(err, errTo)
}

func (s *server) ListFiles(req *dsecv1.ListFilesRequest, stream grpc.ServerStreamingServer[dsecv1.ListFilesResponse]) error {
	return s.wire(stream.Context(), "ListFiles", s.listFiles(req, stream))
}

func (s *server) listFiles(req *dsecv1.ListFilesRequest, stream grpc.ServerStreamingServer[dsecv1.ListFilesResponse]) error {
	in, g, err := s.guest(stream.Context(), req.GetSandboxId())
	if err != nil {
		return err
	}
	defer s.e.begin(in)()
	if req.GetDepth() < -1 {
		return sandbox.Errorf(sandbox.InvalidArgument, "invalid_depth", "depth %d; it is -1 for all below, or how many levels", req.GetDepth())
	}
	dir, err := filePath(req.GetPath(), req.GetRawPath())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	list, err := g.ListFiles(ctx, dir, in.userOf(req.GetUser()), int(max(req.GetDepth(), -1)))
	if err != nil {
		return err
	}
	defer list.Close()
	stalled := time.AfterFunc(listStall, func() {
		cancel(sandbox.Errorf(sandbox.Canceled, "list_stalled", "nobody took anything of the listing for %v", listStall))
	})
	defer stalled.Stop()
	batch, size := &dsecv1.ListFilesResponse{}, 0
	for {
		e, err := list.Next()
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return err
		}
		if !last {
			batch.Files = append(batch.Files, fileInfoOf(e))
			size += len(e.Path) + len(e.LinkTarget) + 64
		}
		if last && len(batch.Files) > 0 || len(batch.Files) >= listBatch || size >= listBatchBytes {
			stalled.Reset(listStall)
			if err := stream.Send(batch); err != nil {
				return err
			}
			batch, size = &dsecv1.ListFilesResponse{}, 0
		}
		if last {
			return nil
		}
	}
}

func (s *server) WatchFiles(req *dsecv1.WatchFilesRequest, stream grpc.ServerStreamingServer[dsecv1.WatchFilesResponse]) error {
	return s.wire(stream.Context(), "WatchFiles", s.watchFiles(req, stream))
}

func (s *server) watchFiles(req *dsecv1.WatchFilesRequest, stream grpc.ServerStreamingServer[dsecv1.WatchFilesResponse]) error {
	in, g, err := s.guest(stream.Context(), req.GetSandboxId())
	if err != nil {
		return err
	}
	dir, err := filePath(req.GetPath(), req.GetRawPath())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	end := s.e.begin(in) // to begin is activity, to look on is none: a watch that was forgotten keeps no sandbox
	watch, err := g.WatchFiles(ctx, dir, in.userOf(req.GetUser()), req.GetRecursive())
	end()
	if err != nil {
		return err
	}
	defer watch.Close()
	if err := stream.Send(&dsecv1.WatchFilesResponse{Ready: true}); err != nil {
		return err
	}
	batches := make(chan *dsecv1.WatchFilesResponse)
	failed := make(chan error, 1)
	go func() { failed <- readEvents(ctx, watch, batches) }()
	defer func() { cancel(); _ = watch.Close(); <-failed }()
	alive := time.NewTicker(watchAlive)
	defer alive.Stop()
	for {
		m := &dsecv1.WatchFilesResponse{}
		select {
		case err := <-failed:
			failed <- nil
			return err
		case m = <-batches:
		case <-alive.C:
		}
		if err := stream.Send(m); err != nil {
			return err
		}
		alive.Reset(watchAlive)
	}
}

// readEvents makes messages of events that come together.
func readEvents(ctx context.Context, watch FileWatch, batches chan<- *dsecv1.WatchFilesResponse) error {
	for {
		m := &dsecv1.WatchFilesResponse{}
		for size := 0; ; {
			ev, err := watch.Next()
			if err != nil {
				return err
			}
			if ev.Overflow {
				m.Overflow = true
				size += 16 // it may come again and again
			} else {
				e := &dsecv1.FileEvent{Kind: dsecv1.FileEventKind(ev.Kind), Directory: ev.Directory}
				e.Path, e.RawPath = text(ev.Path)
				m.Events = append(m.Events, e)
				size += len(ev.Path) + 16
			}
			if !watch.Buffered() || len(m.Events) >= listBatch || size >= listBatchBytes {
				break
			}
		}
		select {
		case batches <- m:
		case <-ctx.Done():
			return sandbox.AsError(context.Cause(ctx))
		}
	}
}
