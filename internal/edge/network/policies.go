package network

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"dsec/internal/edge/network/allow"
)

// policies are the compiled ones in the filter, each once, however many links have it. A number is never used for another one.
type policies struct {
	filter *filter
	next   uint32
	byID   map[uint32]*compiled
	bySum  map[[sha256.Size]byte]*compiled
}

type compiled struct {
	number uint32
	sum    [sha256.Size]byte
	rules  []allow.Opened
	users  int
}

func newPolicies(f *filter, next uint32) *policies {
	return &policies{filter: f, next: next, byID: make(map[uint32]*compiled), bySum: make(map[[sha256.Size]byte]*compiled)}
}

// get writes a policy, unless it is there, and holds it until put. 0 is the policy that opens nothing.
func (p *policies) get(rules []allow.Opened) (uint32, error) {
	if len(rules) == 0 {
		return 0, nil
	}
	b, err := json.Marshal(rules)
	if err != nil {
		return 0, fmt.Errorf("compile a network policy: %w", err)
	}
	sum := sha256.Sum256(b)
	c := p.bySum[sum]
	if c == nil {
		c = &compiled{number: p.next, sum: sum, rules: rules}
		p.next++
		if err := p.filter.write(c.number, rules); err != nil {
			_ = p.filter.erase(c.number, rules)
			return 0, err
		}
		p.byID[c.number], p.bySum[sum] = c, c
	}
	c.users++
	return c.number, nil
}

// put gives one back that no link has any more.
func (p *policies) put(number uint32) error {
	c := p.byID[number]
	if c == nil {
		return nil
	}
	if c.users--; c.users > 0 {
		return nil
	}
	delete(p.byID, number)
	delete(p.bySum, c.sum)
	return p.filter.erase(number, c.rules)
}
