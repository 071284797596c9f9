package edge

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"dsec/sandbox"
)

// Aethers that are silent after a restart cost nobody but their own sandboxes.
func TestSilentAethersDoNotHoldRecoveryUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		silent := make(map[sandbox.ID]bool)
		for range 3 * parallelLinks {
			silent[w.create(idle(5*time.Second))] = true
		}
		liar, healthy := w.create(), w.create()
		w.detach()
		honest := w.o.Guests
		w.o.Guests = func(ctx context.Context, o GuestOptions) (Guest, error) {
			switch {
			case silent[o.ID]:
				<-ctx.Done()
				return nil, ctx.Err()
			case o.ID == liar:
				return nil, sandbox.Errorf(sandbox.Internal, "guest_protocol", "it broke the protocol")
			}
			return honest(ctx, o)
		}
		began := time.Now()
		w.open()
		if took := time.Since(began); took > 0 {
			t.Errorf("nothing was served for %v", took)
		}
		if r, err := w.exec(healthy, "echo hi", -1); err != nil || string(r.Stdout.Data) != "hi\n" {
			t.Errorf("exec: %v %v", r, err)
		}
		if took := time.Since(began); took > 4*linkTurn {
			t.Errorf("a healthy sandbox waited %v for silent ones", took)
		}
		var one sandbox.ID
		for one = range silent {
			w.expect(one, ready, "") // though its idle time is over soon: its commands are not known
			break
		}
		asked := make(chan error, 1)
		go func() {
			_, err := w.find(one).command("x")
			asked <- err
		}()
		began = time.Now()
		if _, err := w.exec(one, "true", -1); err == nil || time.Since(began) > linkPatience {
			t.Errorf("exec in a silent one: %v after %v", err, time.Since(began))
		}
		if err := <-asked; sandbox.ReasonOf(err) != "sandbox_ended" {
			t.Errorf("a command of a sandbox that is given up: %v", err)
		}
		time.Sleep(reconnectTimeout + 4*linkTurn)
		synctest.Wait()
		for id := range silent {
			w.expect(id, failed, sandbox.ReasonGuestDied)
		}
		w.expect(liar, failed, "guest_protocol")
		w.expect(healthy, ready, "")
		w.close()
	})
}

// A sandbox can be ended, and the edge, while it is not known whether its aether answers.
func TestEndWhileReconnecting(t *testing.T) {
	for _, how := range []string{"delete", "detach", "shutdown", "late"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				id := w.create()
				w.detach()
				honest, silent := w.o.Guests, how != "late"
				w.o.Guests = func(ctx context.Context, o GuestOptions) (Guest, error) {
					if silent {
						<-ctx.Done()
						return nil, ctx.Err()
					}
					time.Sleep(10 * time.Second)
					return honest(ctx, o)
				}
				w.open()
				asked := make(chan error, 1)
				go func() {
					_, err := w.find(id).command("x")
					asked <- err
				}()
				synctest.Wait()
				switch how {
				case "delete":
					w.delete(id, true)
					w.expect(id, stopped, sandbox.ReasonDeleted)
				case "detach":
					w.detach()
					w.o.Guests = honest
					w.open()
					w.expect(id, ready, "")
				case "late":
					w.expect(id, ready, "")
					if r, err := w.exec(id, "echo hi", -1); err != nil || string(r.Stdout.Data) != "hi\n" {
						t.Errorf("%v, %v", r, err)
					}
				}
				w.close()
				if err := <-asked; err == nil {
					t.Error(fmt.Sprint("a command that never was is found"))
				}
			})
		})
	}
}
