package client

import (
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// rawNames is a copy of m in which names that are not UTF-8 stand where they can: in the field raw_x, not in x. So callers
// may put any name into x.
func rawNames[M proto.Message](m M) M {
	m = proto.CloneOf(m)
	moveNames(m.ProtoReflect())
	return m
}

func moveNames(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		v, raw := m.Get(f), fields.ByName("raw_"+f.Name())
		switch {
		case f.Kind() == protoreflect.MessageKind && f.IsList():
			for i := range v.List().Len() {
				moveNames(v.List().Get(i).Message())
			}
		case f.Kind() == protoreflect.MessageKind && !f.IsMap():
			moveNames(v.Message())
		case raw == nil || f.Kind() != protoreflect.StringKind:
		case f.IsList():
			moveList(m, f, raw)
		case !utf8.ValidString(v.String()):
			m.Set(raw, protoreflect.ValueOfBytes([]byte(v.String())))
			m.Clear(f)
		}
	}
}

// moveList moves all names of a list if one is not UTF-8: they have an order.
func moveList(m protoreflect.Message, text, raw protoreflect.FieldDescriptor) {
	names, valid := m.Get(text).List(), true
	for i := range names.Len() {
		valid = valid && utf8.ValidString(names.Get(i).String())
	}
	if valid {
		return
	}
	moved := m.Mutable(raw).List()
	for i := range names.Len() {
		moved.Append(protoreflect.ValueOfBytes([]byte(names.Get(i).String())))
	}
	m.Clear(text)
}
