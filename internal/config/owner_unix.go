//go:build unix

package config

import (
	"fmt"
	"os"
	"syscall"
)

// giveToOwnerOf calls chown with the owner of what is at path. Only root can change owners, and only root needs to.
func giveToOwnerOf(path string, chown func(uid, gid int) error) error {
	info, err := os.Stat(path)
	if err != nil || os.Geteuid() != 0 {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	if err := chown(int(st.Uid), int(st.Gid)); err != nil {
		return fmt.Errorf("keeping the owner: %w", err)
	}
	return nil
}
