/*
 * The packet filter on the router's end of every sandbox's link. One pair of programs serves all slots: the number of a slot
 * is the index of its interface in the router's namespace, and its addresses and MAC follow from the number.
 *
 * What surprises:
 *
 *   - No entry = drop: a slot whose policy is 0, or one that is not in the tries, reaches nothing.
 *   - A policy is replaced by one write to `active`. Its entries are in the tries under its number before that, so that a
 *     packet is judged by the old policy or by the new one.
 *   - TCP and UDP that are refused get a reset or an ICMP error at once, made here of the packet itself: a program inside learns
 *     that it may not, instead of waiting. Nothing of the packet goes further than its own link.
 */
#include "kernel.h"

#define MAX_SLOTS 16384
#define MAX_RANGES 16
#define SAMPLES 64
#define RELAY_PORT 7      /* of the relay's sockets on the router's loopback */
#define REPLY_MARK 0xd5ec /* of what is made here, on its way to the sandbox */

enum reason { ACCEPTED, BAD_FRAME, BAD_PACKET, BAD_PROTOCOL, FORBIDDEN, NOT_ALLOWED, REASONS = 8 };

/* Where slot 0 would be; the loader sets these. */
volatile const __u32 base4;     /* host order */
volatile const __be32 base6[3]; /* the first 96 bits */

struct key4 { __u32 bits, policy; __be32 addr; };
struct key6 { __u32 bits, policy; __be32 addr[4]; };
struct bare4 { __u32 bits; __be32 addr; };
struct bare6 { __u32 bits; __be32 addr[4]; };
struct range { __u16 first, last, protocol; };
struct ranges { __u32 count; struct range r[MAX_RANGES]; };
struct counts { __u64 n[REASONS]; };
struct sample {
	__be32 addr[4]; /* of IPv4 mapped to IPv6 */
	__u32 what; /* port, protocol (8 bits), reason (8 bits) */
	__u32 pad;
	__u64 count, last; /* ns of the monotonic clock */
};
struct samples { struct bpf_spin_lock lock; __u32 next; /* to be overwritten */ struct sample s[SAMPLES]; };

struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, MAX_SLOTS); __type(key, __u32); __type(value, __u32); } active SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_LPM_TRIE); __uint(max_entries, 1 << 20); __uint(map_flags, BPF_F_NO_PREALLOC); __type(key, struct key4); __type(value, struct ranges); } open4 SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_LPM_TRIE); __uint(max_entries, 1 << 20); __uint(map_flags, BPF_F_NO_PREALLOC); __type(key, struct key6); __type(value, struct ranges); } open6 SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_LPM_TRIE); __uint(max_entries, 4096); __uint(map_flags, BPF_F_NO_PREALLOC); __type(key, struct bare4); __type(value, __u8); } forbidden4 SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_LPM_TRIE); __uint(max_entries, 4096); __uint(map_flags, BPF_F_NO_PREALLOC); __type(key, struct bare6); __type(value, __u8); } forbidden6 SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, MAX_SLOTS); __type(key, __u32); __type(value, struct counts); } refused SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, MAX_SLOTS); __uint(map_flags, BPF_F_NO_PREALLOC); __type(key, __u32); __type(value, struct samples); } sampled SEC(".maps");

/* A packet, as far as it is looked at. */
struct packet {
	__u32 slot;
	__u32 v6;
	__be32 local[4];  /* the sandbox's address; of IPv4 only the last */
	__be32 remote[4]; /* the other one */
	__be16 local_port, remote_port;
	__u8 protocol;
	__u8 flags;   /* of TCP: the byte at offset 13 */
	__u16 header; /* of TCP, bytes */
	__u32 payload; /* of TCP, bytes */
	__be32 seq, ack;
};

#define FIN 1
#define SYN 2
#define RST 4
#define ACK 16

inlined int parse4(struct __sk_buff *skb, struct packet *p, int out)
{
	struct iphdr ip;
	if (load_bytes(skb, ETH_HLEN, &ip, sizeof ip))
		return BAD_PACKET;
	__be32 source = out ? ip.daddr : ip.saddr;
	p->local[3] = source;
	p->remote[3] = out ? ip.saddr : ip.daddr;
	p->protocol = ip.protocol;
	if (source != be32(base4 + p->slot))
		return BAD_FRAME;
	if (ip.version != 4 || ip.ihl != 5 || (ip.frag_off & be16(0x3fff)))
		return BAD_PACKET;
	p->payload = be16(ip.tot_len) - sizeof ip;
	return ACCEPTED;
}

inlined int parse6(struct __sk_buff *skb, struct packet *p, int out)
{
	struct ipv6hdr ip;
	if (load_bytes(skb, ETH_HLEN, &ip, sizeof ip))
		return BAD_PACKET;
	struct in6_addr *local = out ? &ip.daddr : &ip.saddr, *remote = out ? &ip.saddr : &ip.daddr;
	__builtin_memcpy(p->local, local, 16);
	__builtin_memcpy(p->remote, remote, 16);
	p->protocol = ip.nexthdr;
	if (p->local[0] != base6[0] || p->local[1] != base6[1] || p->local[2] != base6[2] || p->local[3] != be32(p->slot))
		return BAD_FRAME;
	if (ip.version != 6)
		return BAD_PACKET;
	switch (ip.nexthdr) { /* extension headers */
	case 0: case 43: case 44: case 50: case 51: case 60: case 135: case 139: case 140:
		return BAD_PACKET;
	}
	p->payload = be16(ip.payload_len);
	return ACCEPTED;
}

inlined int parse(struct __sk_buff *skb, struct packet *p, int out)
{
	struct ethhdr eth;
	p->slot = skb->ifindex;
	if (skb->vlan_present || load_bytes(skb, 0, &eth, sizeof eth))
		return BAD_FRAME;
	if (!out) { /* both ends of a link have one MAC: 02:64 and the IPv4 address */
		__be32 addr = be32(base4 + p->slot);
		__u16 *a = (__u16 *)&addr, *s = (__u16 *)eth.h_source, *d = (__u16 *)eth.h_dest;
		if (s[0] != be16(0x0264) || s[1] != a[0] || s[2] != a[1] || d[0] != s[0] || d[1] != s[1] || d[2] != s[2])
			return BAD_FRAME;
	}
	int bad;
	if (eth.h_proto == be16(ETH_P_IP))
		bad = parse4(skb, p, out);
	else if (eth.h_proto == be16(ETH_P_IPV6))
		p->v6 = 1, bad = parse6(skb, p, out);
	else
		return BAD_FRAME;
	if (bad)
		return bad;
	__u32 at = ETH_HLEN + (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	__be16 ports[2];
	if (p->protocol == IPPROTO_UDP) {
		if (load_bytes(skb, at, ports, sizeof ports))
			return BAD_PACKET;
	} else if (p->protocol == IPPROTO_TCP) {
		__u8 tcp[20];
		if (load_bytes(skb, at, tcp, sizeof tcp))
			return BAD_PACKET;
		__builtin_memcpy(ports, tcp, sizeof ports);
		__builtin_memcpy(&p->seq, tcp + 4, 4);
		__builtin_memcpy(&p->ack, tcp + 8, 4);
		p->header = (tcp[12] >> 4) * 4;
		p->flags = tcp[13];
		if (p->header < 20)
			return BAD_PACKET;
	} else {
		return BAD_PROTOCOL;
	}
	p->local_port = ports[out ? 1 : 0];
	p->remote_port = ports[out ? 0 : 1];
	return ACCEPTED;
}

/* judge_by says whether a policy opens the remote end. */
inlined int judge_by(struct packet *p, __u32 policy)
{
	struct ranges *r;
	if (p->v6) {
		struct key6 k = {32 + 128, policy};
		__builtin_memcpy(k.addr, p->remote, 16);
		r = map_lookup(&open6, &k);
	} else {
		struct key4 k = {32 + 32, policy, p->remote[3]};
		r = map_lookup(&open4, &k);
	}
	if (!r)
		return NOT_ALLOWED;
	__u16 port = be16(p->remote_port);
	for (__u32 i = 0; i < MAX_RANGES; i++) {
		if (i >= r->count)
			break;
		struct range *one = &r->r[i];
		if (one->protocol == p->protocol && one->first <= port && port <= one->last)
			return ACCEPTED;
	}
	return NOT_ALLOWED;
}

inlined int forbidden(struct packet *p)
{
	if (p->v6) {
		struct bare6 f = {128};
		__builtin_memcpy(f.addr, p->remote, 16);
		return !!map_lookup(&forbidden6, &f);
	}
	struct bare4 f = {32, p->remote[3]};
	return !!map_lookup(&forbidden4, &f);
}

/* judge says whether a slot's policy opens the remote end. */
inlined int judge(struct packet *p)
{
	if (forbidden(p))
		return FORBIDDEN;
	__u32 slot = p->slot;
	volatile __u32 *active_policy = map_lookup(&active, &slot);
	if (!active_policy)
		return NOT_ALLOWED;
	__u32 policy = *active_policy, verdict = NOT_ALLOWED;
	if (policy)
		verdict = judge_by(p, policy);
	if (verdict == ACCEPTED)
		return ACCEPTED;
	__u32 next = *active_policy; /* it may have been replaced, and its entries removed, just now */
	return next && next != policy ? judge_by(p, next) : NOT_ALLOWED;
}

/*
 * record counts a refused packet, and its destination among the last ones. It is verified by itself, once: it is not static.
 */
__attribute__((noinline)) int record(struct packet *p, int reason)
{
	if (!p)
		return 0;
	__u32 slot = p->slot;
	struct counts *c = map_lookup(&refused, &slot);
	if (c)
		__sync_fetch_and_add(&c->n[reason & (REASONS - 1)], 1);
	struct samples *all = map_lookup(&sampled, &slot);
	if (!all)
		return 0;
	__be32 mapped = p->v6 ? p->remote[2] : be32(0xffff);
	__u32 what = (__u32)be16(p->remote_port) << 16 | (__u32)p->protocol << 8 | (reason & (REASONS - 1));
	__u64 t = now();
	__u32 i;
	for (i = 0; i < SAMPLES; i++) {
		struct sample *s = &all->s[i];
		if (!((s->addr[3] ^ p->remote[3]) | (s->addr[2] ^ mapped) | (s->addr[1] ^ p->remote[1]) | (s->addr[0] ^ p->remote[0]) | (s->what ^ what)))
			break;
	}
	lock(&all->lock);
	struct sample *s = &all->s[(i < SAMPLES ? i : all->next) & (SAMPLES - 1)];
	if (i >= SAMPLES) {
		all->next++;
		s->addr[0] = p->remote[0], s->addr[1] = p->remote[1], s->addr[2] = mapped, s->addr[3] = p->remote[3];
		s->what = what, s->count = 0;
	}
	s->count++;
	s->last = t;
	unlock(&all->lock);
	return 0;
}

inlined __u16 fold(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

/* The pseudo header that TCP and ICMPv6 add to their sum. */
inlined __s64 pseudo(struct packet *p, __u32 len, __u8 protocol)
{
	__be32 v[4] = {be32(len), be32(protocol)};
	__s64 sum = csum_diff(0, 0, v, 8, 0);
	if (!p->v6) {
		v[0] = p->remote[3], v[1] = p->local[3];
		return csum_diff(0, 0, v, 8, sum);
	}
	return csum_diff(0, 0, p->local, 16, csum_diff(0, 0, p->remote, 16, sum));
}

/* reply_ip writes the IP header of an answer with len bytes behind it. */
inlined int reply_ip(struct __sk_buff *skb, struct packet *p, __u32 len, __u8 protocol)
{
	if (p->v6) {
		struct ipv6hdr ip = {.version = 6, .payload_len = be16(len), .nexthdr = protocol, .hop_limit = 64};
		__builtin_memcpy(&ip.saddr, p->remote, 16);
		__builtin_memcpy(&ip.daddr, p->local, 16);
		return store_bytes(skb, ETH_HLEN, &ip, sizeof ip, 0);
	}
	struct iphdr ip = {.version = 4, .ihl = 5, .tot_len = be16(sizeof ip + len), .frag_off = be16(0x4000), .ttl = 64,
			   .protocol = protocol, .saddr = p->remote[3], .daddr = p->local[3]};
	ip.check = fold(csum_diff(0, 0, (__be32 *)&ip, sizeof ip, 0));
	return store_bytes(skb, ETH_HLEN, &ip, sizeof ip, 0);
}

inlined int reply_reset(struct __sk_buff *skb, struct packet *p)
{
	__u32 at = ETH_HLEN + (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	if ((p->flags & RST) || p->payload < p->header)
		return -1;
	__be32 t[5] = {};
	t[0] = (__u32)p->remote_port | (__u32)p->local_port << 16;
	if (p->flags & ACK) {
		t[1] = p->ack;
		t[3] = be32(5u << 28 | RST << 16);
	} else {
		__u32 len = p->payload - p->header + !!(p->flags & SYN) + !!(p->flags & FIN);
		t[2] = be32(be32(p->seq) + len);
		t[3] = be32(5u << 28 | (RST | ACK) << 16);
	}
	t[4] = fold(csum_diff(0, 0, t, sizeof t, pseudo(p, sizeof t, IPPROTO_TCP)));
	if (change_tail(skb, at + sizeof t, 0) || reply_ip(skb, p, sizeof t, IPPROTO_TCP))
		return -1;
	return store_bytes(skb, at, t, sizeof t, 0);
}

/*
 * reply_unreachable answers a datagram: port unreachable, or with IPv6 "administratively prohibited". A connected socket reads either as an
 * error at once.
 */
inlined int reply_unreachable(struct __sk_buff *skb, struct packet *p)
{
	if (p->v6) { /* ICMP header, and the packet's IPv6 and UDP headers */
		__be32 m[2 + 10 + 2] = {be32(1u << 24 | 1u << 16)};
		if (load_bytes(skb, ETH_HLEN, m + 2, 48))
			return -1;
		__u16 sum = fold(csum_diff(0, 0, m, sizeof m, pseudo(p, sizeof m, IPPROTO_ICMPV6)));
		((__u16 *)m)[1] = sum;
		if (change_tail(skb, ETH_HLEN + 40 + sizeof m, 0) || reply_ip(skb, p, sizeof m, IPPROTO_ICMPV6))
			return -1;
		return store_bytes(skb, ETH_HLEN + 40, m, sizeof m, 0);
	}
	__be32 m[2 + 5 + 2] = {be32(3u << 24 | 3u << 16)}; /* ICMP header, and the packet's IPv4 and UDP headers */
	if (load_bytes(skb, ETH_HLEN, m + 2, 28))
		return -1;
	((__u16 *)m)[1] = fold(csum_diff(0, 0, m, sizeof m, 0));
	if (change_tail(skb, ETH_HLEN + 20 + sizeof m, 0) || reply_ip(skb, p, sizeof m, IPPROTO_ICMP))
		return -1;
	return store_bytes(skb, ETH_HLEN + 20, m, sizeof m, 0);
}

/* refuse drops a packet, or turns it into the answer that it is refused. */
inlined int refuse(struct __sk_buff *skb, struct packet *p, int reason)
{
	record(p, reason);
	if (reason != FORBIDDEN && reason != NOT_ALLOWED)
		return TC_ACT_SHOT;
	if (p->protocol == IPPROTO_TCP ? reply_reset(skb, p) : reply_unreachable(skb, p))
		return TC_ACT_SHOT;
	skb->mark = REPLY_MARK; /* both ends have one MAC: the Ethernet header stays */
	return redirect(skb->ifindex, 0);
}

inlined void fill(struct bpf_sock_tuple *t, struct packet *p)
{
	if (p->v6) {
		__builtin_memcpy(t->ipv6.saddr, p->local, 16);
		__builtin_memcpy(t->ipv6.daddr, p->remote, 16);
		t->ipv6.sport = p->local_port, t->ipv6.dport = p->remote_port;
	} else {
		t->ipv4.saddr = p->local[3], t->ipv4.daddr = p->remote[3];
		t->ipv4.sport = p->local_port, t->ipv4.dport = p->remote_port;
	}
}

/* relay_tuple is where the relay's sockets for what is new wait. No packet from a sandbox has this destination. */
inlined void relay_tuple(struct bpf_sock_tuple *t, __u32 v6)
{
	__builtin_memset(t, 0, sizeof *t);
	if (v6)
		t->ipv6.daddr[3] = be32(1), t->ipv6.dport = be16(RELAY_PORT);
	else
		t->ipv4.daddr = be32(0x7f000001), t->ipv4.dport = be16(RELAY_PORT);
}

inlined int to_relay(struct __sk_buff *skb, struct packet *p, int tcp)
{
	struct bpf_sock_tuple t;
	__u32 size = p->v6 ? sizeof t.ipv6 : sizeof t.ipv4;
	__builtin_memset(&t, 0, sizeof t);
	fill(&t, p);
	struct bpf_sock *sk;
	if (tcp) { /* an opening, or what may be the answer to a cookie: the listener resets it if it is not */
		if ((sk = lookup_tcp(skb, &t, size, BPF_F_CURRENT_NETNS, 0))) {
			int known = sk->state != BPF_TCP_LISTEN && (sk->state != BPF_TCP_TIME_WAIT || !(p->flags & SYN));
			release_sock(sk);
			if (known)
				return TC_ACT_OK; /* the kernel finds it likewise */
		}
		relay_tuple(&t, p->v6);
		sk = lookup_tcp(skb, &t, size, BPF_F_CURRENT_NETNS, 0);
	} else {
		if ((sk = lookup_udp(skb, &t, size, BPF_F_CURRENT_NETNS, 0))) {
			int known = sk->state == BPF_TCP_ESTABLISHED; /* connected, so with this very sandbox and port */
			release_sock(sk);
			if (known)
				return TC_ACT_OK;
		}
		relay_tuple(&t, p->v6);
		sk = lookup_udp(skb, &t, size, BPF_F_CURRENT_NETNS, 0);
	}
	if (!sk) /* there is no relay just now: the kernel resets what another one had */
		return tcp && !(p->flags & SYN) ? TC_ACT_OK : TC_ACT_SHOT;
	long failed = assign_sock(skb, sk, 0);
	release_sock(sk);
	return failed ? TC_ACT_SHOT : TC_ACT_OK;
}

SEC("tc")
int from_sandbox(struct __sk_buff *skb)
{
	struct packet p = {};
	int reason = parse(skb, &p, 0);
	if (!reason)
		reason = judge(&p);
	if (reason)
		return refuse(skb, &p, reason);
	if (p.protocol == IPPROTO_UDP)
		return to_relay(skb, &p, 0);
	if ((p.flags & RST) || (p.flags & (SYN | ACK)) == (SYN | ACK) || !(p.flags & (SYN | ACK)))
		return TC_ACT_OK;
	return to_relay(skb, &p, 1);
}

SEC("tc")
int to_sandbox(struct __sk_buff *skb)
{
	struct packet p = {};
	if (skb->mark == REPLY_MARK)
		return TC_ACT_OK;
	if (parse(skb, &p, 1))
		return TC_ACT_SHOT;
	/* The reset of a connection that the policy does not allow any more says nothing else. */
	if (p.protocol == IPPROTO_TCP && (p.flags & RST) && p.payload <= p.header)
		return TC_ACT_OK;
	return judge(&p) ? TC_ACT_SHOT : TC_ACT_OK;
}

char terms[] SEC("license") = "Apache-2.0";
