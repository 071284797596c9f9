/* What filter.c needs of the kernel beside its uapi headers: a machine that generates needs clang and linux-libc-dev only. */
#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#define SEC(name) __attribute__((section(name), used))
#define inlined static inline __attribute__((always_inline))
/* The loader reads maps' properties from the types of these fields. */
#define __uint(name, val) int(*name)[val]
#define __type(name, val) typeof(val) *name
#define barrier() __asm__ __volatile__("" ::: "memory")

#define be16(x) __builtin_bswap16(x)
#define be32(x) __builtin_bswap32(x)

static void *(*map_lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*now)(void) = (void *)BPF_FUNC_ktime_get_ns;
static long (*load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) = (void *)BPF_FUNC_skb_load_bytes;
static long (*store_bytes)(void *skb, __u32 offset, const void *from, __u32 len, __u64 flags) = (void *)BPF_FUNC_skb_store_bytes;
static long (*change_tail)(void *skb, __u32 len, __u64 flags) = (void *)BPF_FUNC_skb_change_tail;
static __s64 (*csum_diff)(__be32 *from, __u32 from_size, __be32 *to, __u32 to_size, __u32 seed) = (void *)BPF_FUNC_csum_diff;
static long (*redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;
static struct bpf_sock *(*lookup_tcp)(void *skb, struct bpf_sock_tuple *t, __u32 size, __u64 netns, __u64 flags) = (void *)BPF_FUNC_skc_lookup_tcp;
static struct bpf_sock *(*lookup_udp)(void *skb, struct bpf_sock_tuple *t, __u32 size, __u64 netns, __u64 flags) = (void *)BPF_FUNC_sk_lookup_udp;
static long (*release_sock)(void *sk) = (void *)BPF_FUNC_sk_release;
static long (*assign_sock)(void *skb, void *sk, __u64 flags) = (void *)BPF_FUNC_sk_assign;
static long (*lock)(struct bpf_spin_lock *) = (void *)BPF_FUNC_spin_lock;
static long (*unlock)(struct bpf_spin_lock *) = (void *)BPF_FUNC_spin_unlock;
