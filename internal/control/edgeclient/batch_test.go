package edgeclient

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "dsec/api/edge/v1"
)

// sender is the other end of a batcher: a batch is answered after took.
type sender struct {
	took time.Duration

	mu    sync.Mutex
	sizes []int
	sent  []time.Time
}

func (s *sender) send(_ context.Context, b *batch) {
	s.mu.Lock()
	s.sizes, s.sent = append(s.sizes, len(b.creates)), append(s.sent, time.Now())
	s.mu.Unlock()
	time.Sleep(s.took)
	for _, w := range b.creates {
		w.answer <- answer{}
	}
}

func add(t *testing.T, b *batcher, size int) *waiting {
	w := &waiting{req: &edgev1.CreateSandbox{Deadline: timestamppb.New(time.Now().Add(time.Minute))}, size: size, answer: make(chan answer, 1)}
	if err := b.add(w); err != nil {
		t.Error(err)
	}
	return w
}

// One after the other: none waits for company.
func TestCreatesOneByOneGoOutAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sender{took: 10 * time.Millisecond}
		var b batcher
		b.init(s.send)
		defer b.close()
		for range 5 {
			began := time.Now()
			<-add(t, &b, 100).answer
			if d := time.Since(began); d != s.took {
				t.Errorf("an answer that takes %v took %v", s.took, d)
			}
			synctest.Wait()
		}
		if !slices.Equal(s.sizes, []int{1, 1, 1, 1, 1}) {
			t.Errorf("batches of %v", s.sizes)
		}
	})
}

// Behind one that takes long, others wait for maxBatchDelay or until they are many.
func TestCreatesGatherBehindAnother(t *testing.T) {
	for name, c := range map[string]struct {
		creates, size int
		delay         time.Duration // of the first of them that goes out
		sizes         []int
	}{
		"few":   {3, 100, maxBatchDelay, []int{1, 3}},
		"many":  {maxBatch + 1, 100, 0, []int{1, 1, maxBatch}},
		"large": {3, maxBatchBytes/2 + 1, 0, []int{1, 1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &sender{took: time.Second}
				var b batcher
				b.init(s.send)
				defer b.close()
				add(t, &b, 100)
				began := time.Now()
				for range c.creates {
					add(t, &b, c.size)
				}
				time.Sleep(s.took / 2)
				synctest.Wait()
				got := slices.Clone(s.sizes)
				slices.Sort(got) // each goes out on its own
				if d := s.sent[1].Sub(began); !slices.Equal(got, c.sizes) || d != c.delay {
					t.Errorf("batches of %v after %v", s.sizes, d)
				}
			})
		})
	}
}
