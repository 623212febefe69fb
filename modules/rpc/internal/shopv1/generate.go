// Package shopv1 is generated from internal/proto/shop/v1/shop.proto: the service of the
// example and of the tests.
package shopv1

// With protoc and its plug-ins for Go, gRPC and Connect in the PATH:
//go:generate sh -c "cd ../.. && protoc -I internal/proto --go_out=. --go_opt=module=github.com/holdfast-go/holdfast/modules/rpc --go-grpc_out=. --go-grpc_opt=module=github.com/holdfast-go/holdfast/modules/rpc --connect-go_out=. --connect-go_opt=module=github.com/holdfast-go/holdfast/modules/rpc shop/v1/shop.proto"
