// Verifies a layer with the reference implementation of eStargz: the table of contents against the digest given, then
// every file's bytes against the chunk digests in it. Built with Debian's packages golang-go and
// golang-github-containerd-stargz-snapshotter-dev:
//
//	GO111MODULE=off GOPATH=/usr/share/gocode go build -o verify verify.go
//	./verify LAYER TOC-DIGEST
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/opencontainers/go-digest"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	file, err := os.Open(os.Args[1])
	check(err)
	info, err := file.Stat()
	check(err)
	reader, err := estargz.Open(io.NewSectionReader(file, 0, info.Size()))
	check(err)
	verifier, err := reader.VerifyTOC(digest.Digest(os.Args[2]))
	check(err)
	files, bytes := 0, int64(0)
	var walk func(entry *estargz.TOCEntry, path string)
	walk = func(entry *estargz.TOCEntry, path string) {
		if entry.Type == "reg" {
			content, err := reader.OpenFile(path)
			check(err)
			for offset := int64(0); offset < entry.Size; {
				chunk, ok := reader.ChunkEntryForOffset(path, offset)
				if !ok {
					check(fmt.Errorf("%s: no chunk for offset %d", path, offset))
				}
				verify, err := verifier.Verifier(chunk)
				check(err)
				// At once: the reader inflates a chunk from its beginning for every read.
				data := make([]byte, chunk.ChunkSize)
				_, err = content.ReadAt(data, chunk.ChunkOffset)
				if err != io.EOF {
					check(err)
				}
				verify.Write(data)
				if !verify.Verified() {
					check(fmt.Errorf("%s: the chunk at %d is not what its digest says", path, offset))
				}
				offset = chunk.ChunkOffset + chunk.ChunkSize
			}
			files++
			bytes += entry.Size
		}
		entry.ForeachChild(func(name string, child *estargz.TOCEntry) bool {
			inner := name
			if path != "" {
				inner = path + "/" + name
			}
			walk(child, inner)
			return true
		})
	}
	root, ok := reader.Lookup("")
	if !ok {
		check(fmt.Errorf("no root"))
	}
	walk(root, "")
	fmt.Printf("%d files, %d bytes\n", files, bytes)
}
