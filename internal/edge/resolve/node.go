package resolve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// serverTimeout is how long one name server may take. The next is asked then.
const serverTimeout = 2 * time.Second

// ParseServers reads name servers: addresses, each with a port if it is not 53.
func ParseServers(list []string) ([]netip.AddrPort, error) {
	var servers []netip.AddrPort
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil {
			servers = append(servers, netip.AddrPortFrom(a, 53))
			continue
		}
		ap, err := netip.ParseAddrPort(s)
		if err != nil || ap.Port() == 0 {
			return nil, fmt.Errorf("%.100q is not the address of a name server, such as 10.0.0.2 or 10.0.0.2:5353", s)
		}
		servers = append(servers, ap)
	}
	return servers, nil
}

// Node looks names up as the node does: in /etc/hosts, then with these servers, or else those of /etc/resolv.conf. A server that
// fails or is silent costs serverTimeout; the one that answered last is asked first. That a name does not exist is an answer.
func Node(servers []netip.AddrPort) Lookup {
	var good atomic.Int64 // the server to begin with
	return func(ctx context.Context, name string) ([]netip.Addr, error) {
		if strings.Contains(name, ".") {
			name += "." // the node's search list is for names of one word
		}
		list := servers
		if len(list) == 0 {
			list = nodeServers()
		}
		if len(list) == 0 {
			return lookUp(ctx, &net.Resolver{PreferGo: true}, name)
		}
		var errs []error
		first := int(good.Load())
		for i := range list {
			n := (first + i) % len(list)
			found, err := lookUp(ctx, through(list[n]), name)
			var e *net.DNSError
			if err == nil || errors.As(err, &e) && e.IsNotFound {
				good.Store(int64(n))
				return found, err
			}
			errs = append(errs, err)
			if ctx.Err() != nil {
				break
			}
		}
		return nil, errors.Join(errs...)
	}
}

func lookUp(ctx context.Context, r *net.Resolver, name string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, serverTimeout)
	defer cancel()
	return r.LookupNetIP(ctx, "ip", name)
}

// through asks one server, whatever the node's configuration says.
func through(server netip.AddrPort) *net.Resolver {
	var d net.Dialer
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return d.DialContext(ctx, network, server.String())
	}}
}

// maxResolvConf bounds what is read of /etc/resolv.conf.
const maxResolvConf = 64 << 10

func nodeServers() []netip.AddrPort {
	f, err := os.Open("/etc/resolv.conf")
	if err != nil {
		return nil
	}
	defer f.Close()
	raw := make([]byte, maxResolvConf)
	n, _ := f.Read(raw) // what cannot be read names no server
	return parseResolvConf(string(raw[:n]))
}

func parseResolvConf(text string) []netip.AddrPort {
	var servers []netip.AddrPort
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err == nil {
				servers = append(servers, netip.AddrPortFrom(a, 53))
			}
		}
	}
	return servers
}
