package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dsec/internal/config"
	"dsec/internal/control"
	"dsec/internal/control/apiserver"
	"dsec/internal/control/iam"
	"dsec/internal/control/store"
	imagestore "dsec/internal/image/store"
	"dsec/internal/inflight"
	"dsec/internal/linux"
	"dsec/sandbox"
)

// A controlPlane is the control plane of this machine with the parts that it runs on.
type controlPlane struct {
	control *control.Control
	rows    store.Store
	images  *imagestore.Posix
	code    sandbox.EdgeCode
	log     *slog.Logger

	connections int // that may be open at a time
}

// openControl opens the rows and the images, and wires the control plane. Nothing serves yet.
func openControl(ctx context.Context, o *upOptions, listener net.Addr, log *slog.Logger) (_ *controlPlane, err error) {
	p := &controlPlane{log: log}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	site, err := portSite(o.portsDomain, listener)
	if err != nil {
		return nil, err
	}
	if p.rows, err = store.OpenSQLite(ctx, o.database()); err != nil {
		return nil, err
	}
	if err = defineServices(ctx, p.rows); err != nil {
		return nil, err
	}
	if p.images, err = imagestore.OpenPosix(o.storeDir()); err != nil {
		return nil, err
	}
	if p.code, err = edgeCode(ctx, p.rows); err != nil {
		return nil, err
	}
	limits, connections, err := o.bounds()
	if err != nil {
		return nil, err
	}
	p.connections = connections
	p.control, err = control.New(ctx, control.Options{
		Store: p.rows, Images: control.Images{Store: p.images}, Version: version, Log: log, PortSite: site, Requests: limits,
		Edges: []control.Edge{localEdge(p.code, o.edgeSocket(), o.bytesSocket())},
	})
	return p, err
}

// firstServices are what a new platform calls the registries that are asked for most.
var firstServices = []sandbox.Service{
	{Name: "pypi", Description: "Python packages", Endpoints: https("pypi.org", "files.pythonhosted.org")},
	{Name: "npm", Description: "Node.js packages", Endpoints: https("registry.npmjs.org")},
	{Name: "go", Description: "Go modules", Endpoints: https("proxy.golang.org", "sum.golang.org")},
}

func https(hosts ...string) []sandbox.NetworkEndpoint {
	list := make([]sandbox.NetworkEndpoint, len(hosts))
	for i, host := range hosts {
		list[i] = sandbox.NetworkEndpoint{Host: host, FirstPort: 443, LastPort: 443, Protocol: sandbox.TCP}
	}
	return list
}

// defineServices defines each of them once: what an administrator has changed or removed stays so.
func defineServices(ctx context.Context, rows store.Store) error {
	for _, s := range firstServices {
		if _, err := rows.DefineService(ctx, store.Service{Service: s, ChangedAt: time.Now(), ChangedBy: "dsec up"}); err != nil {
			return fmt.Errorf("defining service %s: %w", s.Name, err)
		}
	}
	return nil
}

// portSite is where browsers reach ports of sandboxes; "" = nowhere.
func portSite(domain string, listener net.Addr) (apiserver.PortSite, error) {
	if domain == "" {
		return apiserver.PortSite{}, nil
	}
	port := 0
	if a, ok := listener.(*net.TCPAddr); ok {
		port = a.Port
	}
	return apiserver.ParsePortSite(domain, port)
}

// localEdge is an edge of this machine, by the paths of its two sockets.
func localEdge(code sandbox.EdgeCode, rpc, bytes string) control.Edge {
	dial := func(path string) func(context.Context) (net.Conn, error) {
		return func(ctx context.Context) (net.Conn, error) { return linux.DialUnix(ctx, path) }
	}
	return control.Edge{Code: code, Address: "unix://" + rpc, Dial: dial(rpc), DialBytes: dial(bytes)}
}

// edgeCode is the code of this machine's edge: made once, never reused.
func edgeCode(ctx context.Context, rows store.Store) (sandbox.EdgeCode, error) {
	edges, err := rows.Edges(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the edges: %w", err)
	}
	if len(edges) > 0 {
		return edges[0].Code, nil
	}
	return sandbox.NewEdgeCode(), nil
}

// storedIdentity is the code and the grants' public key of a platform that is not running; "" if it never ran.
func storedIdentity(ctx context.Context, p *platform) (code sandbox.EdgeCode, key string, err error) {
	err = withStored(ctx, p, func(rows store.Store, access *iam.IAM) error {
		edges, err := rows.Edges(ctx)
		if err == nil && len(edges) > 0 {
			code, key = edges[0].Code, hex.EncodeToString(access.PublicKey())
		}
		return err
	})
	return code, key, err
}

// opensWith reports whether an API key is one of a platform that is not running.
func opensWith(ctx context.Context, p *platform, apiKey string) (ok bool, err error) {
	err = withStored(ctx, p, func(_ store.Store, access *iam.IAM) error {
		_, err := access.Authenticate(ctx, "Bearer "+apiKey)
		if ok = err == nil; sandbox.ClassOf(err) == sandbox.Unauthenticated {
			return nil
		}
		return err
	})
	return ok, err
}

// withStored opens what a platform has stored, if it ever ran.
func withStored(ctx context.Context, p *platform, do func(store.Store, *iam.IAM) error) error {
	if _, err := os.Stat(p.database()); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	rows, err := store.OpenSQLite(ctx, p.database())
	if err != nil {
		return err
	}
	defer rows.Close()
	access, err := iam.New(ctx, rows, time.Now)
	if err != nil {
		return err
	}
	return do(rows, access)
}

// edgeArgs are the flags of the edge that belong to this control plane.
func (p *controlPlane) edgeArgs() []string {
	return []string{"--code", string(p.code), "--grant-key", hex.EncodeToString(p.control.PublicKey())}
}

// serve answers on l until the returned function is called.
func (p *controlPlane) serve(l net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	server := apiserver.NewHTTPServer(p.control.Handler(), p.log)
	bounded := inflight.Listen(l, p.connections)
	server.ConnState = bounded.Note
	var wg sync.WaitGroup
	wg.Go(func() { p.control.Run(ctx) })
	wg.Go(func() { server.Serve(bounded) })
	return func() {
		grace, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		if server.Shutdown(grace) != nil {
			server.Close() // requests that wait for something; their clients try again
		}
		cancel()
		wg.Wait()
	}
}

// close ends what openControl opened. Closing again does nothing.
func (p *controlPlane) close() {
	var errs []error
	if p.control != nil {
		errs = append(errs, p.control.Close())
	}
	if p.images != nil {
		errs = append(errs, p.images.Close())
	}
	if p.rows != nil {
		errs = append(errs, p.rows.Close())
	}
	p.control, p.images, p.rows = nil, nil, nil
	if err := errors.Join(errs...); err != nil {
		p.log.Error("control plane did not end in order", "error", err)
	}
}

// writeContext puts URL and key where the SDK and the command line find them, and says where that is. A key that still works
// is kept.
func (p *controlPlane) writeContext(ctx context.Context, c *console, name, address string) (path string, err error) {
	if path, err = configPath(c); err != nil {
		return "", err
	}
	old, err := config.Load(path)
	if err != nil {
		return "", err
	}
	key, err := p.control.BootstrapKey(ctx, old.Contexts[name].APIKey)
	if err != nil {
		return "", err
	}
	return path, config.SetContext(path, name, config.Context{URL: address, APIKey: key})
}

// configPath is the user's config file, for any process.
func configPath(c *console) (string, error) {
	path, err := config.Path(c.getenv)
	if err != nil {
		return "", err
	}
	return filepath.Abs(path)
}
