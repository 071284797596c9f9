package guest

import (
	"errors"
	"strconv"
	"strings"

	aetherv1 "dsec/api/aether/v1"
	"dsec/internal/wire"
	"dsec/sandbox"
)

type meaning struct {
	class  sandbox.Class
	reason string
}

var meanings = map[aetherv1.Code]meaning{
	aetherv1.Code_CODE_INVALID:        {sandbox.InvalidArgument, "invalid_request"},
	aetherv1.Code_CODE_NOT_FOUND:      {sandbox.NotFound, "not_found"},
	aetherv1.Code_CODE_NOT_EXECUTABLE: {sandbox.FailedPrecondition, "not_executable"},
	aetherv1.Code_CODE_TOO_LARGE:      {sandbox.InvalidArgument, "argument_list_too_long"},
	aetherv1.Code_CODE_NO_SHELL:       {sandbox.FailedPrecondition, "no_shell"},
	aetherv1.Code_CODE_NO_USER:        {sandbox.NotFound, "user_not_found"},
	aetherv1.Code_CODE_NO_CWD:         {sandbox.NotFound, "workdir_not_found"},
	aetherv1.Code_CODE_RESOURCES:      {sandbox.ResourceExhausted, "sandbox_resources"},
	aetherv1.Code_CODE_NO_SPACE:       {sandbox.ResourceExhausted, "no_space"},
	aetherv1.Code_CODE_NO_INODES:      {sandbox.ResourceExhausted, "no_inodes"},
	aetherv1.Code_CODE_QUOTA:          {sandbox.ResourceExhausted, "quota_exceeded"},
	aetherv1.Code_CODE_FILE_TOO_LARGE: {sandbox.InvalidArgument, "file_too_large"},
	aetherv1.Code_CODE_READ_ONLY:      {sandbox.FailedPrecondition, "read_only"},
	aetherv1.Code_CODE_BUSY:           {sandbox.FailedPrecondition, "file_busy"},
	aetherv1.Code_CODE_CROSS_DEVICE:   {sandbox.FailedPrecondition, "cross_device"},
	aetherv1.Code_CODE_NAME_TOO_LONG:  {sandbox.InvalidArgument, "name_too_long"},
	aetherv1.Code_CODE_TOO_MANY_LINKS: {sandbox.ResourceExhausted, "too_many_links"},
	aetherv1.Code_CODE_PERMISSION:     {sandbox.PermissionDenied, "permission_denied"},
	aetherv1.Code_CODE_IS_DIRECTORY:   {sandbox.FailedPrecondition, "is_directory"},
	aetherv1.Code_CODE_NOT_DIRECTORY:  {sandbox.FailedPrecondition, "not_directory"},
	aetherv1.Code_CODE_EXISTS:         {sandbox.AlreadyExists, "file_exists"},
	aetherv1.Code_CODE_IO:             {sandbox.DataLoss, "io_error"},
	aetherv1.Code_CODE_NO_TERMINALS:   {sandbox.ResourceExhausted, "no_terminals"},
	aetherv1.Code_CODE_NO_SESSION:     {sandbox.NotFound, "session_not_found"},
	aetherv1.Code_CODE_SESSION_ENDED:  {sandbox.FailedPrecondition, "session_ended"},
	aetherv1.Code_CODE_DIGEST:         {sandbox.InvalidArgument, "content_mismatch"},
	aetherv1.Code_CODE_FROZEN:         {sandbox.Unavailable, "sandbox_frozen"},
	aetherv1.Code_CODE_NOT_STOPPED:    {sandbox.FailedPrecondition, "not_stopped"},
	aetherv1.Code_CODE_NO_TOOLS:       {sandbox.Unsupported, "no_trusted_tools"},
	aetherv1.Code_CODE_UNSAFE_ENTRY:   {sandbox.InvalidArgument, "unsafe_entry"},
	aetherv1.Code_CODE_BAD_ARCHIVE:    {sandbox.InvalidArgument, "bad_archive"},
	aetherv1.Code_CODE_NOT_EMPTY:      {sandbox.FailedPrecondition, "directory_not_empty"},
	aetherv1.Code_CODE_CHANGED:        {sandbox.FailedPrecondition, "file_changed"},
}

// advice says what to do, where aether does not know.
var advice = map[aetherv1.Code]string{
	aetherv1.Code_CODE_NO_SPACE:  "; the disk is full: remove files, or create the sandbox with a larger disk limit",
	aetherv1.Code_CODE_NO_INODES: "; the disk has room, but not for more files: remove some",
	aetherv1.Code_CODE_QUOTA:     "; the sandbox has used its disk limit: remove files, or create it with a larger one",
	aetherv1.Code_CODE_NOT_EMPTY: "; with recursive, all below is removed, too",
	aetherv1.Code_CODE_BUSY:      "; a program that runs cannot be written to in place, and a mount point not removed",
	aetherv1.Code_CODE_READ_ONLY: "; it is not part of the sandbox's own disk",
}

const maxErrorText = 2048

// fromAether makes an Error of what aether answered. notFound is the reason for a thing that does not exist.
func fromAether(m *aetherv1.Error, notFound string) *sandbox.Error {
	what, ok := meanings[m.Code]
	if !ok {
		what = meaning{sandbox.Internal, "guest_error"}
	}
	if m.Code == aetherv1.Code_CODE_NOT_FOUND {
		what.reason = notFound
	}
	text := m.Message
	if len(text) > maxErrorText {
		text = text[:maxErrorText]
	}
	text = strings.ToValidUTF8(text, "\uFFFD")
	if text == "" {
		text = "the sandbox could not do it"
	}
	text += advice[m.Code]
	return sandbox.Errorf(what.class, what.reason, "%s", text)
}

func outputDropped(offset, next int64) *sandbox.Error {
	return sandbox.Errorf(sandbox.NotFound, "output_dropped",
		"output at offset %d is no longer kept: it was over the cap; what is kept goes on at offset %d", offset, next).
		WithFact("offset", strconv.FormatInt(offset, 10)).WithFact("next_offset", strconv.FormatInt(next, 10))
}

func unresponsive(what string) *sandbox.Error {
	return sandbox.Errorf(sandbox.Unavailable, "guest_unresponsive", "the sandbox did not %s in time; it may be overloaded: try again", what)
}

var (
	errGone     = sandbox.Errorf(sandbox.Unavailable, "guest_died", "the sandbox's processes have ended")
	errClosed   = sandbox.Errorf(sandbox.Unavailable, "edge_stopping", "the edge is stopping; ask again, the sandbox goes on")
	errBroken   = sandbox.Errorf(sandbox.Unavailable, "guest_disconnected", "the connection to the sandbox broke during the transfer; try again")
	errKey      = errors.New("aether ended the connection at the greeting")
	errOldGuest = sandbox.Errorf(sandbox.Unsupported, "no_trusted_tools", "this sandbox was made by a version of dsec without trusted commands; create a new one")
	errVersion  = sandbox.Errorf(sandbox.FailedPrecondition, "guest_version", "the sandbox's aether speaks no version of the protocol that this edge knows")
)

// violation is what no honest aether does.
func violation(what string) error {
	return sandbox.Errorf(sandbox.Internal, "guest_protocol", "the sandbox's aether broke the protocol: %s", what).WithCause(wire.ErrProtocol)
}
