package policy

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sort"
)

// An instruction of classic BPF: struct sock_filter.
type instruction struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

// Classic BPF, the part that a seccomp filter needs.
const (
	opLoad = 0x20 // BPF_LD | BPF_W | BPF_ABS
	opAnd  = 0x54 // BPF_ALU | BPF_AND | BPF_K
	opJump = 0x05 // BPF_JMP | BPF_JA
	opJeq  = 0x15 // BPF_JMP | BPF_JEQ | BPF_K
	opJge  = 0x35 // BPF_JMP | BPF_JGE | BPF_K
	opRet  = 0x06 // BPF_RET | BPF_K

	offNumber = 0 // offsets in struct seccomp_data
	offArch   = 4
	offArgs   = 16

	archX8664       = 0xc000003e // AUDIT_ARCH_X86_64
	maxInstructions = 4096       // BPF_MAXINSNS
)

// An interval is the rule from a number up to the next interval.
type interval struct {
	from uint32
	rule Rule
}

func (r Rule) same(o Rule) bool {
	return len(r.Clauses) == 0 && len(o.Clauses) == 0 && r.Otherwise == o.Otherwise
}

// intervals covers all numbers, also those of the x32 ABI, which have bit 30 set and so are never known.
func (p Profile) intervals() []interval {
	numbers := make([]uint32, 0, len(p))
	for nr := range p {
		numbers = append(numbers, nr)
	}
	slices.Sort(numbers)
	unknown := Rule{Otherwise: ErrnoNosys}
	out := []interval{{0, unknown}}
	add := func(from uint32, r Rule) {
		last := &out[len(out)-1]
		switch {
		case last.rule.same(r):
		case last.from == from:
			last.rule = r
		default:
			out = append(out, interval{from, r})
		}
	}
	for i, nr := range numbers {
		add(nr, p[nr])
		if i+1 == len(numbers) || numbers[i+1] != nr+1 {
			add(nr+1, unknown)
		}
	}
	return out
}

// compile makes a program of about log2(intervals) comparisons per call.
func compile(p Profile) ([]instruction, error) {
	ivs := p.intervals()
	if !sort.SliceIsSorted(ivs, func(i, j int) bool { return ivs[i].from < ivs[j].from }) {
		return nil, fmt.Errorf("compile system call filter: intervals out of order")
	}
	prog := []instruction{
		{code: opLoad, k: offArch},
		{code: opJeq, k: archX8664, jt: 1},
		{code: opRet, k: uint32(ErrnoNosys)}, // i386 through int 0x80
		{code: opLoad, k: offNumber},
	}
	prog = append(prog, tree(ivs)...)
	if len(prog) > maxInstructions {
		return nil, fmt.Errorf("compile system call filter: %d instructions, at most %d", len(prog), maxInstructions)
	}
	return prog, nil
}

// tree is a binary search; the accumulator holds the number.
func tree(ivs []interval) []instruction {
	if len(ivs) == 1 {
		return leaf(ivs[0].rule)
	}
	mid := len(ivs) / 2
	left, right := tree(ivs[:mid]), tree(ivs[mid:])
	var prog []instruction
	if len(left) <= 255 {
		prog = append(prog, instruction{code: opJge, k: ivs[mid].from, jt: uint8(len(left))})
	} else { // conditional jumps reach 255 instructions
		prog = append(prog,
			instruction{code: opJge, k: ivs[mid].from, jf: 1},
			instruction{code: opJump, k: uint32(len(left))})
	}
	return append(append(prog, left...), right...)
}

func leaf(r Rule) []instruction {
	var prog []instruction
	for _, c := range r.Clauses {
		prog = append(prog, clause(c)...)
	}
	return append(prog, instruction{code: opRet, k: uint32(r.Otherwise)})
}

func clause(c Clause) []instruction {
	var prog []instruction
	for _, m := range c.When {
		// Little endian: the low half of a 64-bit argument comes first.
		prog = append(prog, instruction{code: opLoad, k: offArgs + 8*uint32(m.Arg)})
		if m.Mask != all32 {
			prog = append(prog, instruction{code: opAnd, k: m.Mask})
		}
		prog = append(prog, instruction{code: opJeq, k: m.Value})
	}
	for i := range prog { // whatever does not match goes on behind the clause's return
		if prog[i].code == opJeq {
			prog[i].jf = uint8(len(prog) - i)
		}
	}
	return append(prog, instruction{code: opRet, k: uint32(c.Then)})
}

func encode(prog []instruction) []byte {
	out := make([]byte, 0, 8*len(prog))
	for _, i := range prog {
		out = binary.NativeEndian.AppendUint16(out, i.code)
		out = append(out, i.jt, i.jf)
		out = binary.NativeEndian.AppendUint32(out, i.k)
	}
	return out
}
