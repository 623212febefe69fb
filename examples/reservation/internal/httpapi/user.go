package httpapi

import (
	"context"
	"net/http"
	"regexp"
)

// UserHeader names the user. It is a mock: a real shop would check a credential here.
const UserHeader = "X-Mock-User-Id"

var userPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

type userKey struct{}

func requireUser(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		values := r.Header.Values(UserHeader)
		if len(values) != 1 || !userPattern.MatchString(values[0]) {
			newProblem(http.StatusBadRequest, codeUserRequired,
				"header "+UserHeader+" must hold 1 to 64 of A-Z a-z 0-9 . _ -").write(w)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), userKey{}, values[0])))
	})
}

// userOf is the user that requireUser found.
func userOf(ctx context.Context) string {
	user, _ := ctx.Value(userKey{}).(string)
	return user
}
