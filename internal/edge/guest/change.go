package guest

import (
	"context"
	"strconv"

	aetherv1 "dsec/api/aether/v1"
	"dsec/sandbox"
)

// Bounds of one request to aether; longer ones are cut into several.
const (
	maxBatch      = 256
	maxBatchBytes = 256 << 10 // an answer can be several times that, and still be one message
	maxStatBytes  = 16 << 20  // of all that one StatFiles may find
)

// Kinds of a Change.
const (
	MakeDirectory = aetherv1.ChangeKind_CHANGE_KIND_MAKE_DIRECTORY
	MoveFile      = aetherv1.ChangeKind_CHANGE_KIND_MOVE
	CopyFile      = aetherv1.ChangeKind_CHANGE_KIND_COPY
	RemoveFile    = aetherv1.ChangeKind_CHANGE_KIND_REMOVE
	SetMode       = aetherv1.ChangeKind_CHANGE_KIND_SET_MODE
	SetOwner      = aetherv1.ChangeKind_CHANGE_KIND_SET_OWNER
	MakeLink      = aetherv1.ChangeKind_CHANGE_KIND_MAKE_LINK
)

// A Change is one change of a file; its kind says which of the rest counts. See api/aether/v1.
type Change struct {
	Kind                                  aetherv1.ChangeKind
	Path, To, Owner                       string
	Mode                                  uint32
	Recursive, Exclusive, MissingOK, Hard bool
}

// A FileStat is what is known of one path: an entry, or why not.
type FileStat struct {
	Entry FileEntry
	Err   error
}

// StatFiles tells about each path by itself.
func (c *Client) StatFiles(ctx context.Context, user string, paths []string, follow bool) ([]FileStat, error) {
	c.changed(true)
	out := make([]FileStat, 0, len(paths))
	size := 0
	for len(paths) > 0 {
		if size > maxStatBytes {
			return nil, sandbox.Errorf(sandbox.ResourceExhausted, "answer_too_large", "the answer would be larger than %d MiB: ask for fewer paths at once", maxStatBytes>>20)
		}
		n, bytes := 0, 0
		for n < len(paths) && n < maxBatch/2 && (n == 0 || bytes+len(paths[n]) <= maxBatchBytes) { // an answer holds the target of a link, too
			bytes += len(paths[n])
			n++
		}
		req := &aetherv1.StatFiles{Paths: rawPaths(paths[:n]), User: user, Follow: follow}
		reply, err := c.call(ctx, &aetherv1.Call{Call: &aetherv1.Call_StatFiles{StatFiles: req}}, "file_not_found", requestTimeout)
		if err != nil {
			return nil, err
		}
		results := reply.GetStatResults().GetResults()
		if len(results) != n {
			return nil, violation("answers about other files than were asked for")
		}
		for _, r := range results {
			s := FileStat{}
			if r.Error != nil {
				e := fromAether(r.Error, "file_not_found")
				s.Err, size = e, size+len(e.Message)
			} else if s.Entry, err = entryFrom(r.File); err != nil {
				return nil, err
			}
			size += len(s.Entry.LinkTarget)
			out = append(out, s)
		}
		paths = paths[n:]
	}
	return out, nil
}

// ChangeFiles makes changes in order, up to the first that fails: the fact "index" of the error says which. There is no bound
// on the time, but that of ctx: when it ends, aether stops.
func (c *Client) ChangeFiles(ctx context.Context, user string, changes []Change) error {
	c.changed(true)
	done := 0
	for done < len(changes) {
		batch := nextBatch(changes[done:])
		req := &aetherv1.ChangeFiles{User: user, Changes: batch}
		reply, err := c.call(ctx, &aetherv1.Call{Call: &aetherv1.Call_ChangeFiles{ChangeFiles: req}}, "file_not_found", 0)
		if err != nil {
			return err
		}
		r := reply.GetChangeResult()
		switch {
		case r == nil, int(r.Done) > len(batch), (int(r.Done) == len(batch)) != (r.Error == nil):
			return violation("an answer about other changes than were asked for")
		case r.Error != nil:
			e := fromAether(r.Error, "file_not_found")
			if len(changes) == 1 {
				return e
			}
			at := done + int(r.Done)
			e.Message = "change " + strconv.Itoa(at) + " of " + strconv.Itoa(len(changes)) + " (from 0; those before it were made): " + e.Message
			return e.WithFact("index", strconv.Itoa(at))
		}
		done += len(batch)
	}
	return nil
}

func nextBatch(changes []Change) []*aetherv1.Change {
	var batch []*aetherv1.Change
	bytes := 0
	for _, ch := range changes {
		bytes += len(ch.Path) + len(ch.To) + len(ch.Owner)
		if len(batch) == maxBatch || (len(batch) > 0 && bytes > maxBatchBytes) {
			break
		}
		batch = append(batch, &aetherv1.Change{
			Kind: ch.Kind, Path: []byte(ch.Path), To: []byte(ch.To), Mode: ch.Mode, Owner: ch.Owner,
			Recursive: ch.Recursive, Exclusive: ch.Exclusive, MissingOk: ch.MissingOK, Hard: ch.Hard,
		})
	}
	return batch
}

func rawPaths(paths []string) [][]byte {
	raw := make([][]byte, len(paths))
	for i, p := range paths {
		raw[i] = []byte(p)
	}
	return raw
}
