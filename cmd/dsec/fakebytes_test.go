package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/sandbox"
)

// The byte routes of the fake platform.

func (f *fakePlatform) serveOutput(w http.ResponseWriter, r *http.Request) {
	c, err := f.command(r.PathValue("id"), r.PathValue("cmd"))
	offset, perr := strconv.ParseInt(r.FormValue("offset"), 10, 64)
	if err == nil && perr != nil {
		offset, perr = c.begin(r, map[string]int{"stdout": 0, "stderr": 1}[r.PathValue("stream")])
		w.Header().Set("Dsec-Offset", strconv.FormatInt(offset, 10))
	}
	if err != nil || perr != nil {
		byteError(w, http.StatusNotFound, sandbox.Errorf(sandbox.NotFound, "command_unknown", "there is no such command"))
		return
	}
	i := map[string]int{"stdout": 0, "stderr": 1}[r.PathValue("stream")]
	f.mu.Lock()
	limit, short := f.cutOutput, false
	if f.shortOutput > 0 && r.FormValue("follow") != "" {
		f.shortOutput--
		short = true
	}
	f.mu.Unlock()
	for sent := 0; ; {
		c.mu.Lock()
		all := c.streams[i].Bytes()
		if d := c.dropped[i]; offset >= d[0] && offset < d[1] {
			c.mu.Unlock()
			if sent > 0 || r.FormValue("follow") != "" { // the edge has sent the headers by then
				http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			byteError(w, http.StatusNotFound, sandbox.Errorf(sandbox.NotFound, "output_dropped", "these bytes are no longer kept").WithFact("next_offset", strconv.FormatInt(d[1], 10)))
			return
		} else if offset < d[0] {
			all = all[:d[0]]
		}
		data := bytes.Clone(all[min(offset, int64(len(all))):])
		running, change := c.result.Running, c.change
		c.mu.Unlock()
		if limit > 0 && sent+len(data) > limit {
			w.Write(data[:limit-sent])
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		w.Write(data)
		sent, offset = sent+len(data), offset+int64(len(data))
		http.NewResponseController(w).Flush()
		if short || len(data) == 0 && (!running || r.FormValue("follow") == "") {
			return
		}
		if len(data) == 0 {
			select {
			case <-change:
			case <-r.Context().Done():
				return
			}
		}
	}
}

func (f *fakePlatform) serveStdin(w http.ResponseWriter, r *http.Request) {
	c, err := f.command(r.PathValue("id"), r.PathValue("cmd"))
	if err != nil {
		byteError(w, http.StatusNotFound, sandbox.Errorf(sandbox.NotFound, "command_unknown", "there is no such command"))
		return
	}
	offset, _ := strconv.ParseInt(r.FormValue("offset"), 10, 64)
	data, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	c.turn.Lock()
	defer c.turn.Unlock()
	if r.FormValue("exact") != "" && offset != c.stdinAt {
		byteError(w, http.StatusConflict, sandbox.Errorf(sandbox.FailedPrecondition, "stdin_moved", "more has arrived").WithFact("offset", strconv.FormatInt(c.stdinAt, 10)))
		return
	}
	if have := c.stdinAt - offset; have > 0 { // sent again
		data = data[min(have, int64(len(data))):]
	}
	n, err := c.stdinW.Write(data)
	c.mu.Lock()
	c.stdinAt += int64(n)
	c.mu.Unlock()
	if err != nil {
		byteError(w, http.StatusConflict, sandbox.Errorf(sandbox.FailedPrecondition, "stdin_closed", "the command has closed its input"))
		return
	}
	if r.FormValue("close") != "" {
		c.stdinW.Close()
	}
	fmt.Fprintf(w, `{"offset":"%d"}`, c.stdinAt)
}

func (f *fakePlatform) serveFile(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	file, ok := f.files[r.FormValue("path")]
	limit := f.cutOutput
	f.mu.Unlock()
	if !ok {
		byteError(w, http.StatusNotFound, sandbox.Errorf(sandbox.NotFound, "file_not_found", "there is no file %s in the sandbox", r.FormValue("path")))
		return
	}
	offset, _ := strconv.Atoi(r.FormValue("offset"))
	data := file.data[offset:]
	w.Header().Set("Dsec-Mode", file.mode)
	w.Header().Set("Dsec-Mtime", file.mtime)
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	if limit > 0 && len(data) > limit {
		w.Write(data[:limit])
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	w.Write(data)
}

func (f *fakePlatform) receiveFile(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.files[r.FormValue("path")] = fakeFile{data: data, mode: r.FormValue("mode"), user: r.FormValue("user"), mtime: r.Header.Get("Dsec-Sha256")}
	fmt.Fprintf(w, `{"size":"%d"}`, len(data))
}

func (f *fakePlatform) receiveArchive(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	if strings.HasPrefix(name, "refused") {
		byteError(w, http.StatusBadRequest, sandbox.Errorf(sandbox.InvalidArgument, "bad_archive", "the archive is refused"))
		return
	}
	data, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	e := &dsecv1.Environment{
		Kind: r.PathValue("kind"), Name: name, Digest: "sha256:" + strings.Repeat("cd", 32), Size: 3 << 20, Entries: 7, FileBytes: int64(len(data)),
		CreatedAt: timestamppb.New(testTime.Add(-2 * time.Hour)),
		Config:    &dsecv1.EnvironmentConfig{User: r.FormValue("user"), Workdir: r.FormValue("workdir"), Env: map[string]string{}},
	}
	for _, kv := range r.Form["env"] {
		k, v, _ := strings.Cut(kv, "=")
		e.Config.Env[k] = v
	}
	if strings.HasPrefix(name, "dev") {
		e.Dropped = []string{"dev/sda", "dev/sdb"}
	}
	f.mu.Lock()
	f.environments[e.Kind+"/"+name], f.archives[e.Kind+"/"+name] = e, data
	f.mu.Unlock()
	body, _ := protojson.Marshal(e)
	w.Write(body)
}
