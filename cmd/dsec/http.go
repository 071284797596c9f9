package main

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"dsec/client"
	"dsec/sandbox"
)

var httpCommand = command{
	name: "http", group: groupInside, args: "SANDBOX [METHOD] URL",
	summary: "make an HTTP request to a server inside a sandbox",
	details: `The URL's host is the sandbox: localhost:PORT/PATH, or :PORT/PATH. The answer's body goes to standard output; with --include after its
status and headers. METHOD is GET, or POST if there is data. The exit code is 22 if the status is 400 or more and --fail is given.

  dsec http s4k2 localhost:8000/health
  dsec http s4k2 POST :8000/run -H 'Content-Type: application/json' -d '{"n": 1}'
  dsec http s4k2 PUT :8000/blob -d @- < blob`,
	setup: setupHTTP,
}

// exitHTTP is curl's exit code for a status that is an error.
const exitHTTP = 22

type httpOptions struct {
	headers               list
	data                  string
	include, fail, asJSON bool
	timeout               period
	context               *string
	flags                 *flagSet
}

// An answered is what `dsec http --json` prints.
type answered struct {
	Status  int         `json:"status"`
	Headers http.Header `json:"headers"`
	Body    []byte      `json:"body"`
}

// maxJSONBody bounds the body that is printed as JSON, in bytes.
const maxJSONBody = 16 << 20

func setupHTTP(f *flagSet) action {
	o := &httpOptions{context: contextFlag(f), flags: f}
	f.Var(&o.headers, "header", "`NAME: VALUE` of a header; may be repeated")
	f.letter("H", "header")
	f.StringVar(&o.data, "data", "", "`DATA` to send; @FILE for a file's content, @- for standard input")
	f.letter("d", "data")
	f.BoolVar(&o.include, "include", false, "also print status and headers")
	f.letter("i", "include")
	f.BoolVar(&o.fail, "fail", false, "exit with 22 if the status is 400 or more")
	f.Var(&o.timeout, "timeout", "give up after this `DURATION`")
	jsonFlag(f, &o.asJSON, jsonHelp+`: {"status", "headers", "body" as base64}, of a body up to 16 MiB`)
	return o.run
}

func (o *httpOptions) run(ctx context.Context, c *console, args []string) error {
	if err := wantArgs(args, 2, 3, "sandbox or URL"); err != nil {
		return err
	}
	method := http.MethodGet
	if o.flags.given("data") {
		method = http.MethodPost
	}
	if len(args) == 3 {
		method = strings.ToUpper(args[1])
	}
	target, err := insideURL(args[len(args)-1])
	if err != nil {
		return err
	}
	body, err := o.body(c)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return usagef("%v", err)
	}
	if err := setHeaders(r, o.headers); err != nil {
		return err
	}
	sb, err := c.dialSandbox(ctx, *o.context, args[0])
	if err != nil {
		return err
	}
	return o.do(c, sb, r)
}

// insideURL completes a URL.
func insideURL(text string) (string, error) {
	if strings.HasPrefix(text, ":") {
		text = "localhost" + text
	}
	if !strings.Contains(text, "://") {
		text = "http://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", usagef("%q is no URL like localhost:8000/path", clipText(text))
	}
	return text, nil
}

func (o *httpOptions) body(c *console) (io.Reader, error) {
	name, file := strings.CutPrefix(o.data, "@")
	switch {
	case !o.flags.given("data"):
		return nil, nil
	case !file:
		return strings.NewReader(o.data), nil
	case name == "-":
		return client.Piped(c.stdin), nil
	}
	return os.Open(name) // the HTTP client closes it
}

func setHeaders(r *http.Request, headers list) error {
	for _, h := range headers {
		name, value, ok := strings.Cut(h, ":")
		if name = strings.TrimSpace(name); !ok || name == "" {
			return usagef("header %q must be NAME: VALUE", h)
		}
		if value = strings.TrimSpace(value); strings.EqualFold(name, "Host") {
			r.Host = value
		} else {
			r.Header.Add(name, value)
		}
	}
	return nil
}

func (o *httpOptions) do(c *console, sb *client.Sandbox, r *http.Request) error {
	hc := &http.Client{
		Transport: sb.HTTP(), Timeout: time.Duration(o.timeout),
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // as curl
	}
	res, err := hc.Do(r)
	if err != nil {
		return asHTTPError(r, err)
	}
	defer res.Body.Close()
	if o.asJSON {
		raw, err := io.ReadAll(io.LimitReader(res.Body, maxJSONBody))
		if err != nil {
			return asHTTPError(r, err)
		}
		err = c.printJSON(answered{res.StatusCode, res.Header, raw})
		return errors.Join(err, o.judge(res))
	}
	if o.include {
		if err := c.print("%s", head(res)); err != nil {
			return err
		}
	}
	if err := c.pour(res.Body); err != nil {
		return asHTTPError(r, err)
	}
	return o.judge(res)
}

func (o *httpOptions) judge(res *http.Response) error {
	if o.fail && res.StatusCode >= http.StatusBadRequest {
		return &exitError{code: exitHTTP, err: sandbox.Errorf(sandbox.FailedPrecondition, "http_status", "the server answered %s", clipText(res.Status))}
	}
	return nil
}

// head is the status line and the headers of an answer.
func head(res *http.Response) string {
	var b strings.Builder
	b.WriteString(res.Proto + " " + printable(res.Status) + "\r\n")
	for _, name := range slices.Sorted(maps.Keys(res.Header)) {
		for _, v := range res.Header[name] {
			b.WriteString(name + ": " + printable(v) + "\r\n")
		}
	}
	return b.String() + "\r\n"
}

// asHTTPError says what failed without Go's words around it.
func asHTTPError(r *http.Request, err error) error {
	var known *sandbox.Error
	var output *client.WriteError
	var wrapped *url.Error
	switch {
	case errors.As(err, &known), errors.As(err, &output):
		return err
	case errors.As(err, &wrapped) && wrapped.Timeout():
		return sandbox.Errorf(sandbox.DeadlineExceeded, "http_timeout", "the server has not answered %s in time", r.URL.Redacted()).WithCause(err)
	case errors.As(err, &wrapped):
		err = wrapped.Err
	}
	return sandbox.Errorf(sandbox.Unavailable, "http_failed", "the request to %s failed: %s", r.URL.Redacted(), clipText(err.Error())).WithCause(err)
}
