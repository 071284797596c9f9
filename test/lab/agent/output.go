package main

import (
	"errors"
	"io"
	"os"
	"time"

	"dsec/test/lab/job"
)

// drain is how long output is awaited that a job's children still hold open.
const drain = time.Second

func drained() time.Time { return time.Now().Add(drain) }

// copy sends what a job prints until all who could print have ended, or the deadline of r.
func (a *agent) copy(r *os.File) error {
	buf := make([]byte, 16<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := a.out.Encode(job.Event{Output: buf[:n]}); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
	}
}
