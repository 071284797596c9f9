package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"dsec/sandbox"
)

// What an edge claims of the host, so that no other edge touches it: its run directory, and blocks of user ids. A claim is a
// locked file that also says whose it is: the lock ends with the process, but what sandboxes use stays used until the next
// edge of the same platform ends them.

var errLocked = errors.New("already locked by another process")

// lockFile locks the file at path, which is made if it is not there.
func lockFile(path string) (release func(), err error) {
	f, err := openLocked(path)
	if err != nil {
		return nil, err
	}
	return func() { f.Close() }, nil
}

// openLocked opens and locks the file at path. Closing it gives the lock back.
func openLocked(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("opening the lock: %w", err)
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return nil, errLocked
			}
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		if isStill(f, path) {
			return f, nil
		}
		f.Close() // its last owner removed it while we waited at the door
	}
}

func isStill(f *os.File, path string) bool {
	ours, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(path)
	return err == nil && os.SameFile(ours, there)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// claimFile locks the claim at path in the name of owner, unless another's things are still there: stillThere says so of the
// owner that the file names.
func claimFile(path, owner string, stillThere func(owner string) bool) (*os.File, error) {
	f, err := openLocked(path)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(f)
	if err == nil {
		if last := strings.TrimSpace(string(b)); last != "" && last != owner && stillThere(last) {
			err = &claimedError{last}
		}
	}
	if err == nil {
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt([]byte(owner+"\n"), 0)
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("claiming %s: %w", path, err)
	}
	return f, nil
}

// A claimedError says that nobody holds the lock, but what is left belongs to another.
type claimedError struct{ owner string }

func (e *claimedError) Error() string { return "it belongs to " + e.owner }

// ---- the run directory --------------------------------------------------------------------------------------------------

// claimRunDir makes this process the only edge in the run directory, where the sweep of a second one would end the sandboxes of
// the first.
func (p *platform) claimRunDir() (*os.File, error) {
	f, err := claimFile(p.runLock(), p.dataDir, func(dataDir string) bool {
		return exists((&platform{dataDir: dataDir}).journal())
	})
	var claimed *claimedError
	switch {
	case errors.Is(err, errLocked):
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "run_dir_in_use", "the run directory %s is used by another platform; give --run-dir", p.runDir)
	case errors.As(err, &claimed):
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "run_dir_in_use",
			"the run directory %s is used by another platform, which was killed and left its sandboxes there; "+
				"end them with `dsec down --data-dir %s --run-dir %s`, or give --run-dir", p.runDir, claimed.owner, p.runDir)
	}
	return f, err
}

// ownsRunDir reports whether there is a run directory that this platform made.
func (p *platform) ownsRunDir() bool {
	dir, err := os.Stat(p.runDir)
	if err != nil {
		return false
	}
	owner, err := os.ReadFile(p.runLock())
	if err == nil && len(owner) > 0 {
		return strings.TrimSpace(string(owner)) == p.dataDir
	}
	parent, err := os.Stat(filepath.Dir(p.runDir)) // it may have been killed between the mount and the claim
	return err == nil && deviceOf(dir) != deviceOf(parent)
}

func deviceOf(info fs.FileInfo) uint64 {
	st, _ := info.Sys().(*syscall.Stat_t)
	if st == nil {
		return 0
	}
	return uint64(st.Dev)
}

// ---- user ids -----------------------------------------------------------------------------------------------------------

// Sandboxes of all platforms of a machine share the kernel's user ids. They are claimed in blocks, so that no two sandboxes
// have the same: what the kernel counts and permits by uid must not reach from one platform to another.
const (
	idsPerSandbox = 1 << 16
	rangesInBlock = 1 << 12
	idBlockSize   = rangesInBlock * idsPerSandbox
	firstIDBlock  = 1 // below are the host's own users
	lastIDBlock   = 14
	spareRanges   = 64 // made ahead, or of sandboxes that are ending
)

// idBlocksDir is where the blocks of this machine are claimed. It must not outlive a reboot.
var idBlocksDir = "/run/dsec-ids"

// An idClaim is the blocks of one platform.
type idClaim struct {
	first  int
	claims []*os.File
}

func (c *idClaim) base() uint32 { return uint32(c.first) * idBlockSize }

// relayUser is a user of this platform's own, above all blocks.
func (c *idClaim) relayUser() int { return (lastIDBlock+1)*idBlockSize + c.first }

// trialRelayUser is nobody's besides.
const trialRelayUser = (lastIDBlock + 1) * idBlockSize

func (c *idClaim) capacity() int { return len(c.claims) * rangesInBlock }

// claimIDs claims the blocks that the run directory's sandboxes have, or else free ones for as many sandboxes.
func claimIDs(runDir string, sandboxes int) (*idClaim, error) {
	var first, blocks int
	note, err := os.ReadFile(idNote(runDir))
	if err == nil {
		if _, err := fmt.Sscanf(string(note), "%d %d", &first, &blocks); err != nil || first < firstIDBlock || blocks < 1 || first+blocks-1 > lastIDBlock {
			return nil, fmt.Errorf("%s says %q", idNote(runDir), note)
		}
		return claimBlocks(runDir, first, blocks)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading which ids were claimed: %w", err)
	}
	blocks = (sandboxes + spareRanges + rangesInBlock - 1) / rangesInBlock
	for first = firstIDBlock; first+blocks-1 <= lastIDBlock; first++ {
		c, err := claimBlocks(runDir, first, blocks)
		if isTaken(err) {
			continue
		} else if err != nil {
			return nil, err
		}
		if err := os.WriteFile(idNote(runDir), fmt.Appendf(nil, "%d %d\n", first, blocks), 0o600); err != nil {
			c.release()
			return nil, fmt.Errorf("noting which ids are claimed: %w", err)
		}
		return c, nil
	}
	return nil, sandbox.Errorf(sandbox.ResourceExhausted, "no_ids",
		"this machine has no user ids left for %d sandboxes beside those of other platforms; end one with `dsec down`, or give fewer --max-sandboxes", sandboxes)
}

// idNote is where a platform keeps which blocks it has, as long as its run directory exists.
func idNote(runDir string) string { return filepath.Join(runDir, "ids") }

func claimBlocks(runDir string, first, blocks int) (*idClaim, error) {
	c := &idClaim{first: first}
	for n := first; n < first+blocks; n++ {
		f, err := claimBlock(runDir, n)
		if err != nil {
			c.release()
			return nil, err
		}
		c.claims = append(c.claims, f)
	}
	return c, nil
}

func claimBlock(runDir string, n int) (f *os.File, err error) {
	for range 10 { // the directory goes whenever a platform that has the last block ends
		if err := os.MkdirAll(idBlocksDir, 0o700); err != nil {
			return nil, fmt.Errorf("making the directory of id blocks: %w", err)
		}
		f, err = claimFile(filepath.Join(idBlocksDir, strconv.Itoa(n)), runDir, func(owner string) bool { return exists(idNote(owner)) })
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return f, err
}

func isTaken(err error) bool {
	var claimed *claimedError
	return errors.Is(err, errLocked) || errors.As(err, &claimed)
}

// release ends the lock. The blocks stay claimed while the run directory exists. Of no claim it does nothing.
func (c *idClaim) release() {
	if c == nil {
		return
	}
	for _, f := range c.claims {
		f.Close()
	}
	c.claims = nil
}

// giveBack makes the blocks free.
func (c *idClaim) giveBack() {
	if c == nil {
		return
	}
	for _, f := range c.claims {
		os.Remove(f.Name())
	}
	c.release()
	os.Remove(idBlocksDir) // the last one
}
