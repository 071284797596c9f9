package client

import (
	"context"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"

	"google.golang.org/protobuf/encoding/protojson"

	dsecv1 "dsec/api/dsec/v1"
)

// maxEnvironmentJSON bounds the answer to a create, in bytes.
const maxEnvironmentJSON = 16 << 20

// ListEnvironments gives all environments of a kind; "" = of all kinds.
func (c *Client) ListEnvironments(ctx context.Context, kind string) iter.Seq2[*dsecv1.Environment, error] {
	return pages(func(token string) ([]*dsecv1.Environment, string, error) {
		res, err := invoke(ctx, c, c.environments.ListEnvironments, &dsecv1.ListEnvironmentsRequest{Kind: kind, PageSize: pageSize, PageToken: token})
		return res.GetEnvironments(), res.GetNextPageToken(), err
	})
}

// GetEnvironment is one environment by kind and name.
func (c *Client) GetEnvironment(ctx context.Context, kind, name string) (*dsecv1.Environment, error) {
	res, err := invoke(ctx, c, c.environments.GetEnvironment, &dsecv1.GetEnvironmentRequest{Kind: kind, Name: name})
	return res.GetEnvironment(), err
}

// RemoveEnvironment removes a name. Sandboxes that use it go on.
func (c *Client) RemoveEnvironment(ctx context.Context, kind, name string) error {
	_, err := invoke(ctx, c, c.environments.RemoveEnvironment, &dsecv1.RemoveEnvironmentRequest{Kind: kind, Name: name})
	return err
}

// An Archive is what an environment is made of.
type Archive struct {
	Tar      io.Reader                 // plain or gzip. A *io.PipeReader is closed when no more is wanted
	Size     int64                     // less than 0 = unknown
	Config   *dsecv1.EnvironmentConfig // may be nil
	Progress func(sent int64)          // may be nil
}

// CreateEnvironment makes an environment of an archive. It is sent once: a broken upload leaves nothing, and the caller
// repeats it.
func (c *Client) CreateEnvironment(ctx context.Context, kind, name string, a Archive) (*dsecv1.Environment, error) {
	q := url.Values{}
	for k, v := range a.Config.GetEnv() {
		q.Add("env", k+"="+v)
	}
	for k, v := range map[string]string{"user": a.Config.GetUser(), "workdir": a.Config.GetWorkdir()} {
		if v != "" {
			q.Set(k, v)
		}
	}
	body := &source{r: a.Tar, report: a.Progress}
	res, err := c.send(ctx, http.MethodPost, "/v1/environments/"+kind+"/"+name, q, body, a.Size, http.Header{"Content-Type": {"application/x-tar"}})
	if err != nil {
		return nil, c.explain(ctx, err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxEnvironmentJSON))
	if err != nil {
		return nil, c.explain(ctx, err)
	}
	var made dsecv1.Environment
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, &made); err != nil {
		return nil, fmt.Errorf("decoding the platform's answer: %w", err)
	}
	return &made, nil
}
