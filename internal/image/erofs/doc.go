// Package erofs writes and reads the one EROFS form that layers have: a metadata image, and file contents in separate
// blobs (EROFS extra devices). It is pure Go and knows neither the store nor tar.
//
// # The form
//
//	metadata image   block 0: superblock at 1024, device table at 1152
//	                 block 1…: inodes (64-byte extended form), each followed by its xattrs and then by its chunk
//	                 indexes, directory tail or link target
//	                 after the inodes: whole directory blocks, and what does not fit behind its inode
//	blob n           contents of regular files, each piece at a multiple of BlockSize
//
// Regular files are chunk-based inodes: an array of (device, block) indexes, or -1 for a hole. The chunk size is chosen
// per file as large as its extents allow, so a contiguous file costs one index and its reads are never split. Nothing in
// the form ties a layer to one blob: an index names its device, so deduplication needs no new form.
//
// # What surprises
//
//   - Output depends on the tree alone: no build time, the UUID is a digest of the content. Overlayfs wants distinct
//     UUIDs in a stack of lowers, so it must not be a constant.
//   - Inode numbers are byte offsets / 32 from the start of the image. Block 0 holds no inode, hence 0, which readdir(3)
//     takes for "deleted", is never one.
//   - The kernel compares names as unsigned bytes, and "." and ".." are sorted among the others.
//   - A file that goes on in another blob must not do so at the block where it left the one before: through loop devices the
//     kernel reads the wrong one. Write refuses it.
//   - Where an inline tail would cross a block, old kernels (6.1) refuse symbolic links: these go to a block of their own.
//   - The kernel trusts metadata. Only images whose digest was recorded when this package wrote them may be mounted;
//     Verify is a check of our own writer and store, not a licence to mount foreign images.
package erofs
