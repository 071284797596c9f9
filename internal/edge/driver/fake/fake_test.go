package fake_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"dsec/internal/edge/driver"
	"dsec/internal/edge/driver/drivertest"
	"dsec/internal/edge/driver/fake"
	"dsec/sandbox"
)

func harness(host *fake.Host, again func() *fake.Host) drivertest.Harness {
	return drivertest.Harness{
		Driver: host.Driver(),
		Edge:   "faker",
		Spec: func(_ *testing.T, id sandbox.ID) driver.Spec {
			return driver.Spec{ID: id, GuestKey: make([]byte, 32)}
		},
		Kill: func(t *testing.T, h driver.Handle) {
			if err := host.Die(h.ID, driver.Exit{Signal: 9}); err != nil {
				t.Fatal(err)
			}
		},
		Reused: func(_ *testing.T, h driver.Handle) driver.Handle {
			h.Data = json.RawMessage(`{"token":"of another"}`)
			return h
		},
		Objects: func(*testing.T) []string { return host.Objects() },
		Restart: func(*testing.T) driver.Driver { return again().Driver() },
	}
}

func TestConformanceInMemory(t *testing.T) {
	host := fake.NewHost()
	drivertest.Run(t, harness(host, func() *fake.Host { return host }))
}

func TestConformanceInDirectory(t *testing.T) {
	dir := t.TempDir()
	drivertest.Run(t, harness(fake.OpenHost(dir), func() *fake.Host { return fake.OpenHost(dir) }))
}

func TestFailsOnCommand(t *testing.T) {
	host, ctx, boom := fake.NewHost(), context.Background(), errors.New("boom")
	host.On("uppers.Create:after", func(context.Context, sandbox.ID) error { return boom })
	if _, err := host.Uppers().Create(ctx, "s1", 1); !errors.Is(err, boom) {
		t.Errorf("%v", err)
	}
	if got := host.Objects(); len(got) != 1 {
		t.Errorf("a call that failed at its end made %v", got)
	}
	host.On("uppers.Create:after", nil)
	if found, err := host.Uppers().Sweep(ctx, nil); err != nil || len(found) != 1 || len(host.Objects()) != 0 {
		t.Errorf("%v %v", found, err)
	}
}
