package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"dsec/internal/edge/driver"
	"dsec/internal/linux"
)

// An overlays makes roots in the way that this kernel has: of layers given one by one that are attached nowhere, or of one string
// that names layers which are mounted somewhere for that moment.
type overlays struct {
	places string // directory of such places; "" if the kernel needs none
	why    string // it needs them
}

// openOverlays tries which way works, with two directories that exist, and removes what a killed process left in places.
func openOverlays(places, lower, lowest string) (_ overlays, err error) {
	if err := clearPlaces(places); err != nil {
		return overlays{}, err
	}
	o := linux.Overlay{}
	for _, dir := range []string{lower, lowest} {
		fd, err := linux.CloneMountWith(dir, linux.MountAttr{})
		if err != nil {
			return overlays{}, err
		}
		defer linux.Close(fd)
		o.Lowers = append(o.Lowers, fd)
	}
	o.Mounts = o.Lowers
	fd, oneByOne := linux.FSMountOverlay(o)
	if oneByOne == nil {
		linux.Close(fd)
		return overlays{}, nil
	}
	w := overlays{places: places, why: oneByOne.Error()}
	if fd, err = w.mount(o); err != nil {
		return overlays{}, unsupported("overlay file systems", errors.Join(oneByOne, err))
	}
	linux.Close(fd)
	return w, nil
}

func clearPlaces(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if err := errors.Join(linux.UnmountAll(path), linux.RemoveDir(path)); err != nil {
			return err
		}
	}
	return nil
}

func (w overlays) mount(o linux.Overlay) (fd int, err error) {
	if w.places == "" {
		return linux.FSMountOverlay(o)
	}
	place, err := os.MkdirTemp(w.places, "")
	if err != nil {
		return -1, err
	}
	fd, err = linux.MountOverlay(o, place)
	if undo := linux.RemoveDir(place); undo != nil {
		linux.Close(fd)
		return -1, errors.Join(err, undo)
	}
	return fd, err
}

// feature says for people how roots are made.
func (w overlays) feature() (string, driver.Fallback) {
	const what = "overlay, idmapped layers and upper, volatile, nodev; "
	if w.places == "" {
		return what + "layers by fsconfig", driver.Fallback{}
	}
	return what + "layers in one string of options", driver.Fallback{Instead: "layers by fsconfig", Why: w.why,
		Cost: "two mounts and unmounts a layer for each create; at most 240 layers"}
}
