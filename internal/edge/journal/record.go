// Package journal is the edge's append-only record of what exists on its host.
//
// Every host object's name derives from a sandbox's id, so the journal need not describe objects: it says which ids the
// edge has begun, what was asked for, and how to find the ones that were ready. A create writes two records (intent,
// running), each later transition one. Records are framed:
//
//	length uint32 LE | CRC-32C of the payload uint32 LE | payload (JSON of Record)
//
// # What surprises
//
// There is no fsync. The journal must survive kill -9 of the edge, for which the page cache is enough; it need not survive
// a reset of the machine, after which nothing that it describes exists. The first record holds the boot id, which tells the
// two apart. A tail that was cut in the middle of a write is dropped. Whatever was lost that way belongs to no id that the
// journal knows, and so is removed by the sweep at start.
//
// Append returns when the record is in the page cache. Records that arrive while a write is under way go out together in
// the next one.
package journal

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"dsec/internal/edge/driver"
	"dsec/internal/rootfs"
	"dsec/sandbox"
)

// An Op says what a record is about.
type Op string

// Ops, in the order in which a sandbox writes them.
const (
	OpHeader    Op = "header"    // first of the file
	OpIntent    Op = "intent"    // a create was admitted: Intent
	OpRunning   Op = "running"   // it is ready: Running
	OpNetwork   Op = "network"   // its network rules were replaced: Network
	OpActivity  Op = "activity"  // it was in use at At, to within the edge's granularity
	OpEnding    Op = "ending"    // it shall be gone: Reason
	OpEnded     Op = "ended"     // nothing of it is left: Reason
	OpForgotten Op = "forgotten" // its terminal record has been dropped
)

// A Record is one entry. Which of the pointers is set depends on Op.
type Record struct {
	Op      Op         `json:"op"`
	ID      sandbox.ID `json:"id,omitempty"`
	At      time.Time  `json:"at"`
	Header  *Header    `json:"header,omitempty"`
	Intent  *Intent    `json:"intent,omitempty"`
	Running *Running   `json:"running,omitempty"`
	Network *Network   `json:"network,omitempty"`
	Reason  *Reason    `json:"reason,omitempty"`
}

// A Header says whose journal it is and of which boot.
type Header struct {
	Version int              `json:"version"`
	Edge    sandbox.EdgeCode `json:"edge"`
	BootID  string           `json:"boot_id"`
}

// Version of the form of the records.
const Version = 1

// An Intent is everything that was asked for.
type Intent struct {
	Project    string          `json:"project"`
	Principal  string          `json:"principal"`
	Spec       sandbox.Spec    `json:"spec"`
	Network    Network         `json:"network,omitzero"` // its rules when it was made
	Sources    []rootfs.Source `json:"sources"`
	Key        string          `json:"key,omitempty"`    // idempotency key
	Digest     string          `json:"digest,omitempty"` // of the request, tells a retry from a reuse of the key
	OwnerEpoch int64           `json:"owner_epoch,omitempty"`
	CreatedAt  time.Time       `json:"created_at"`
	GuestKey   []byte          `json:"guest_key"`
}

// A Network is network rules: as somebody wrote them, and with their services looked up.
type Network struct {
	Asked map[string]bool       `json:"asked,omitempty"`
	Rules []sandbox.NetworkRule `json:"rules,omitempty"`
}

// A Running finds a ready sandbox again.
type Running struct {
	Handle  driver.Handle            `json:"handle"`
	Cgroups driver.Cgroups           `json:"cgroups"`
	Network driver.Network           `json:"network"`
	Rootfs  rootfs.Container         `json:"rootfs"`
	ReadyAt time.Time                `json:"ready_at"`
	Took    map[string]time.Duration `json:"took,omitempty"` // by step
}

// A Reason says why a sandbox ends.
type Reason struct {
	Code    string    `json:"code"`
	Message string    `json:"message"`
	At      time.Time `json:"at"`
}

// MaxRecord bounds one payload. It is over the largest create that the edge accepts.
const MaxRecord = 8 << 20

const frameHeader = 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendFrame encodes r behind buf.
func appendFrame(buf []byte, r *Record) ([]byte, error) {
	payload, err := json.Marshal(r)
	if err != nil {
		return buf, fmt.Errorf("encoding journal record: %w", err)
	}
	if len(payload) > MaxRecord {
		return buf, fmt.Errorf("journal record of %d bytes; at most %d", len(payload), MaxRecord)
	}
	buf = binary.LittleEndian.AppendUint32(buf, uint32(len(payload)))
	buf = binary.LittleEndian.AppendUint32(buf, crc32.Checksum(payload, castagnoli))
	return append(buf, payload...), nil
}

// errTorn says that the rest of the file cannot be read.
var errTorn = errors.New("torn record")

// readFrame gives the next payload, io.EOF at a clean end, errTorn behind the last good record.
func readFrame(r *bufio.Reader) ([]byte, error) {
	var h [frameHeader]byte
	switch _, err := io.ReadFull(r, h[:]); {
	case errors.Is(err, io.EOF):
		return nil, io.EOF
	case errors.Is(err, io.ErrUnexpectedEOF):
		return nil, errTorn
	case err != nil:
		return nil, err
	}
	n := binary.LittleEndian.Uint32(h[:4])
	if n == 0 || n > MaxRecord {
		return nil, errTorn
	}
	payload := make([]byte, 0, min(n, 64<<10)) // a length that lies costs no more than what is there
	payload, err := readN(r, payload, int(n))
	if err != nil {
		return nil, err
	}
	if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(h[4:]) {
		return nil, errTorn
	}
	return payload, nil
}

func readN(r *bufio.Reader, buf []byte, n int) ([]byte, error) {
	for len(buf) < n {
		part := min(n-len(buf), 64<<10)
		at := len(buf)
		buf = append(buf, make([]byte, part)...)
		switch _, err := io.ReadFull(r, buf[at:]); {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errTorn
		case err != nil:
			return nil, err
		}
	}
	return buf, nil
}

// read calls each for every good record and returns how many bytes they take. torn says that something follows that is
// no record.
func read(src io.Reader, each func(*Record, []byte)) (good int64, torn bool, err error) {
	r := bufio.NewReaderSize(src, 256<<10)
	for {
		payload, err := readFrame(r)
		switch {
		case errors.Is(err, io.EOF):
			return good, false, nil
		case errors.Is(err, errTorn):
			return good, true, nil
		case err != nil:
			return good, false, fmt.Errorf("reading journal: %w", err)
		}
		var rec Record
		if json.Unmarshal(payload, &rec) != nil { // the sum is right: another version wrote it, and wrote more behind it
			return good, true, nil
		}
		good += frameHeader + int64(len(payload))
		each(&rec, payload)
	}
}
