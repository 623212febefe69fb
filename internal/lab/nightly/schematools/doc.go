// Package schematools has tests only: goose, golang-migrate and atlas apply and undo the files that `schema print` writes.
package schematools
