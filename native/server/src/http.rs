//! The requests of proxies and of the JSON API, and their responses.

use std::convert::Infallible;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::{Semaphore, watch};

use crate::access::{Access, Refusal};
use crate::answers::{self, Fields};
use crate::api;
use crate::bodies::Bodies;
use crate::client::ClientAddress;
use crate::decide::{Mode, Outcome, Worker};
use crate::gate::Gate;
use crate::live::{Following, Versions};
use crate::metrics::{self, AskedBy, Counts};
use crate::readings;
use crate::report::report_refused;
use crate::request::{Asked, Origin};

/// Bytes of a body. More are refused.
pub const LARGEST_BODY: usize = 64 << 10;
/// The status of a denial, where a proxy takes only one for a denial.
const STATUS_FIELD: &str = "x-forebay-status";

pub type Answered = Response<Full<Bytes>>;

/// How a proxy describes the request that it asks about. It says so by the path that it is configured to ask, as a
/// client can send fields of another proxy, but can't choose that path.
#[derive(Clone, Copy)]
pub enum Description<'a> {
    /// Fields for the target and for the method.
    Fields(&'static str, &'static str),
    /// The question has the method and the target of the request.
    Itself(&'a str, &'a str),
}

const NGINX: Description<'_> = Description::Fields("x-original-uri", "x-original-method");
const FORWARDING: Description<'_> = Description::Fields("x-forwarded-uri", "x-forwarded-method");
/// Envoy puts it before the path of the request.
const ENVOY: &str = "/auth/envoy";

/// What all threads of a server share.
pub struct Serving {
    pub draining: AtomicBool,
    /// True, and then closed, at the end.
    pub stop: watch::Receiver<bool>,
    /// One for each thread.
    pub counts: Vec<Counts>,
    pub places: Arc<Semaphore>,
    pub connections: usize,
    pub bodies: Bodies,
    pub access: Access,
    /// Of live rules.
    pub versions: Option<Arc<Versions>>,
    /// Whether proxies may ask.
    pub proxies: bool,
    pub api: api::Shared,
    /// If Python decides.
    pub gate: Option<Arc<Gate>>,
}

/// The thread that answers.
pub struct Answering {
    pub following: Following,
    pub serving: Arc<Serving>,
    /// The thread's number.
    pub number: usize,
}

impl Answering {
    pub fn worker(&self) -> Rc<Worker> {
        self.following.worker()
    }

    pub fn count(&self, by: AskedBy, result: metrics::Result) {
        self.serving.count(self.number, by, result);
    }

    /// Answer one request. It never waits, except for the body of a JSON request.
    pub async fn answer(&self, peer: Option<IpAddr>, request: Request<Incoming>) -> Result<Answered, Infallible> {
        if let Some((by, description)) = proxied(&request) {
            if !self.serving.proxies {
                return Ok(not_for_proxies());
            }
            let worker = self.worker();
            let asked = asked_by(description, worker.plan.client.as_ref(), peer, request.headers());
            let decided = asked.map(|asked| worker.decide(&asked, Mode::Charge));
            return Ok(self.serving.decided(self.number, by, decided));
        }
        let method = request.method().clone();
        Ok(match (request.uri().path(), &method) {
            (path, _) if path.starts_with("/v1/") => match (api::call_at(path), &method) {
                (Some(call), &Method::POST) => self.asked_in_json(call, peer, request).await,
                (Some(_), _) => not_allowed("POST"),
                (None, _) => nothing_here(),
            },
            (path, method) => self.serving.page(path, method),
        })
    }

    async fn asked_in_json(&self, by: AskedBy, peer: Option<IpAddr>, request: Request<Incoming>) -> Answered {
        if let Err(refusal) = self.serving.admitted(by, peer, self.worker().plan.client.as_ref(), request.headers()) {
            self.count(by, metrics::Result::Refused);
            return not_admitted(refusal);
        }
        // The fields of a question can be large, and the body may come slowly.
        let (status, document) = match self.serving.bodies.read(request.into_body(), LARGEST_BODY).await {
            Err((status, reason)) => (status, Err(reason)),
            Ok(data) => (StatusCode::UNPROCESSABLE_ENTITY, api::answer(by, &self.worker(), &self.serving.api, &data)),
        };
        self.serving.replied(self.number, by, status, document)
    }
}

impl Serving {
    /// A peek changes nothing, so anybody may call it.
    pub fn admitted(
        &self,
        by: AskedBy,
        peer: Option<IpAddr>,
        client: Option<&ClientAddress>,
        fields: &HeaderMap,
    ) -> Result<(), Refusal> {
        if matches!(by, AskedBy::Peek) { Ok(()) } else { self.access.check(peer, client, fields) }
    }

    /// `number`: the thread's.
    pub fn count(&self, number: usize, by: AskedBy, result: metrics::Result) {
        self.counts[number].count(by, result);
    }

    /// The response to a proxy, by the outcome; an error is one of its configuration.
    pub fn decided(&self, number: usize, by: AskedBy, asked: Result<Outcome, String>) -> Answered {
        self.count(
            number,
            by,
            match &asked {
                Err(reason) => {
                    report_refused(reason);
                    metrics::Result::Refused
                }
                Ok(Outcome { denial: None, .. }) => metrics::Result::Allowed,
                Ok(_) => metrics::Result::Denied,
            },
        );
        if matches!(by, AskedBy::Nginx) { for_nginx(asked) } else { for_proxy(asked) }
    }

    /// The response to a call of the JSON API. `status`: that of an error.
    pub fn replied(&self, number: usize, by: AskedBy, status: StatusCode, document: api::Replied) -> Answered {
        match document {
            Err(reason) => {
                self.count(number, by, metrics::Result::Refused);
                json(status, api::refusal(&reason))
            }
            Ok((allowed, document)) => {
                self.count(number, by, if allowed { metrics::Result::Allowed } else { metrics::Result::Denied });
                json(StatusCode::OK, document)
            }
        }
    }

    /// What the server tells about itself.
    pub fn page(&self, path: &str, method: &Method) -> Answered {
        match (path, method) {
            ("/healthz", &Method::GET | &Method::HEAD) => text(StatusCode::OK, "ok\n".to_owned()),
            ("/readyz", &Method::GET | &Method::HEAD) => match self.draining.load(Ordering::Relaxed) {
                false => text(StatusCode::OK, "ready\n".to_owned()),
                true => text(StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()),
            },
            ("/metrics", &Method::GET | &Method::HEAD) => text(StatusCode::OK, self.metrics()),
            ("/openapi.json", &Method::GET | &Method::HEAD) => json(StatusCode::OK, api::DESCRIPTION.to_owned()),
            ("/healthz" | "/readyz" | "/metrics" | "/openapi.json", _) => not_allowed("GET, HEAD"),
            _ => nothing_here(),
        }
    }

    fn metrics(&self) -> String {
        let version = self.versions.as_ref().map(|versions| versions.seen());
        let unanswered = self.gate.as_ref().map(|gate| gate.unanswered());
        let open = self.connections.saturating_sub(self.places.available_permits());
        metrics::text(&self.counts, unanswered.as_ref().map_or(&[], |each| &each[..]), version, open, self.connections)
    }
}

/// The way of a proxy's question, and how that describes the request.
pub fn proxied<B>(request: &Request<B>) -> Option<(AskedBy, Description<'_>)> {
    let path = request.uri().path();
    Some(match path {
        "/auth/nginx" => (AskedBy::Nginx, NGINX),
        "/auth/traefik" => (AskedBy::Traefik, FORWARDING),
        "/auth/caddy" => (AskedBy::Caddy, FORWARDING),
        _ if path.strip_prefix(ENVOY)?.starts_with('/') => {
            let target = request.uri().path_and_query().map_or("", |target| &target.as_str()[ENVOY.len()..]);
            (AskedBy::Envoy, Description::Itself(request.method().as_str(), target))
        }
        _ => return None,
    })
}

/// An error if this peer can't name clients.
pub fn trusted(client: Option<&ClientAddress>, peer: Option<IpAddr>) -> Result<(), String> {
    match client {
        Some(client) if !client.trusts(peer) => {
            let who = peer.map_or_else(|| "unix".to_owned(), |address| address.to_string());
            Err(format!("the peer {who} is none of the file's trusted_proxies, so it can't name a client"))
        }
        _ => Ok(()),
    }
}

/// The method and the target of that request.
fn described<'a>(
    description: Description<'a>,
    client: Option<&ClientAddress>,
    peer: Option<IpAddr>,
    fields: &'a HeaderMap,
) -> Result<(&'a str, &'a [u8]), String> {
    trusted(client, peer)?;
    if let Some(name) = client.and_then(|client| client.field.as_ref())
        && !fields.contains_key(name)
    {
        return Err(format!("the proxy sends no {name}, in which the file says that it names the client"));
    }
    match description {
        Description::Itself(method, target) => Ok((method, target.as_bytes())),
        Description::Fields(target, method) => {
            let (Some(path), Some(word)) = (single(fields, target), single(fields, method)) else {
                return Err(format!("a proxy sends {target} and {method}, each once"));
            };
            Ok((word.to_str().map_err(|_| format!("{method} is no method"))?, path.as_bytes()))
        }
    }
}

/// The request that a proxy asks about; an error if it is configured wrongly.
pub fn asked_by<'a>(
    description: Description<'a>,
    client: Option<&'a ClientAddress>,
    peer: Option<IpAddr>,
    fields: &'a HeaderMap,
) -> Result<Asked<'a>, String> {
    let (method, target) = described(description, client, peer, fields)?;
    Ok(Asked::new(method, readings::of_target(target), fields, client, Origin::Peer(peer)))
}

/// 200 admits the request; anything else is for its client. An error is no permission to any proxy.
fn for_proxy(asked: Result<Outcome, String>) -> Answered {
    match asked {
        Err(reason) => json(StatusCode::INTERNAL_SERVER_ERROR, api::refusal(&reason)),
        Ok(Outcome { fields, denial: None, .. }) => response(StatusCode::OK, &fields, String::new()),
        Ok(Outcome { denial: Some(denial), .. }) => {
            let status = StatusCode::from_u16(denial.status).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
            response(status, &denial.fields, denial.body)
        }
    }
}

/// nginx passes on no other status than 403 of a denial: a field has it.
fn for_nginx(asked: Result<Outcome, String>) -> Answered {
    let is_denied = asked.as_ref().is_ok_and(|outcome| outcome.denial.is_some());
    let mut answered = for_proxy(asked);
    if is_denied {
        let status = HeaderValue::from(answered.status().as_u16());
        answered.headers_mut().insert(STATUS_FIELD, status);
        *answered.status_mut() = StatusCode::FORBIDDEN;
    }
    answered
}

/// The value of a field that occurs once.
fn single<'a>(fields: &'a HeaderMap, name: &str) -> Option<&'a HeaderValue> {
    let mut values = fields.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

fn response(status: StatusCode, fields: &Fields, body: String) -> Answered {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    for (name, value) in fields {
        // The length is that of the body, whatever a rule's own response says.
        if let Some((name, value)) = answers::field(name, value)
            && name != hyper::header::CONTENT_LENGTH
        {
            response.headers_mut().append(name, value);
        }
    }
    response
}

fn text(status: StatusCode, body: String) -> Answered {
    response(status, &vec![("Content-Type".to_owned(), "text/plain; charset=utf-8".to_owned())], body)
}

fn json(status: StatusCode, body: String) -> Answered {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub fn not_admitted(refusal: Refusal) -> Answered {
    match refusal {
        Refusal::Peer(reason) => json(StatusCode::FORBIDDEN, api::refusal(reason)),
        Refusal::Token => {
            let reason = "send the server's token: Authorization: Bearer TOKEN";
            let mut response = json(StatusCode::UNAUTHORIZED, api::refusal(reason));
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            response
        }
    }
}

pub fn not_for_proxies() -> Answered {
    json(StatusCode::NOT_FOUND, api::refusal("the server was started with --no-proxies"))
}

pub fn nothing_here() -> Answered {
    json(StatusCode::NOT_FOUND, api::refusal("there is nothing at this path: see docs/server.md"))
}

pub fn not_allowed(methods: &'static str) -> Answered {
    let mut response = json(StatusCode::METHOD_NOT_ALLOWED, api::refusal(&format!("this path has {methods} only")));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

#[cfg(test)]
pub mod tests {
    use hyper::header::HeaderName;

    use super::*;
    use crate::client::{as_address, tests::behind};
    use crate::fuzz::Target;
    use crate::readings::Readings;

    pub const PROXIES: Target = Target {
        name: "proxies",
        seeds: &[
            b"/auth/nginx\nGET\nx-original-uri: /a?b\nx-original-method: POST\nx-forwarded-for: 192.0.2.1",
            b"/auth/traefik\nGET\nx-forwarded-uri: //a\nx-forwarded-method: put\nx-http-method: DELETE, a\xdf",
            b"http://a/auth/envoy/b%2fc?d\nPOST\nx_method_override: patch\nupgrade: WebSocket\norigin: a",
        ],
        check: a_proxy_describes_a_request,
    };

    /// The input has the target, the method and the fields of a proxy's question, each in a line.
    fn a_proxy_describes_a_request(data: &[u8]) -> bool {
        let mut lines = data.split(|byte| *byte == b'\n');
        let (target, method) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let Ok(mut request) = Request::builder().uri(target).method(method).body(()) else { return false };
        for line in lines {
            let mut words = line.splitn(2, |byte| *byte == b':');
            let (name, value) = (words.next().unwrap_or_default(), words.next().unwrap_or_default().trim_ascii());
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
                request.headers_mut().append(name, value);
            }
        }
        let Some((_, description)) = proxied(&request) else { return false };
        let (fields, client, proxy) = (request.headers(), behind("x-forwarded-for"), as_address("10.0.0.1"));
        assert!(described(description, Some(&client), as_address("192.0.2.9"), fields).is_err(), "it is no proxy");
        let with_client = described(description, Some(&client), proxy, fields);
        let Ok((method, target)) = described(description, None, None, fields) else {
            assert!(with_client.is_err());
            return false;
        };
        assert_eq!(with_client.ok(), fields.contains_key("x-forwarded-for").then_some((method, target)));
        match description {
            Description::Itself(..) => {
                let asked = request.uri().path_and_query().unwrap().as_str().as_bytes();
                assert_eq!(asked.strip_prefix(ENVOY.as_bytes()), Some(target));
            }
            Description::Fields(of_target, of_method) => {
                assert!(fields.get_all(of_target).iter().eq([target]));
                assert!(fields.get_all(of_method).iter().eq([method]));
            }
        }
        check_asked(
            &Asked::new(method, Readings::default(), fields, Some(&client), Origin::Peer(proxy)),
            method,
            fields,
        );
        true
    }

    fn check_asked(asked: &Asked<'_>, method: &str, fields: &HeaderMap) {
        let has = |method: &str| asked.methods().iter().any(|one| *one == method.to_uppercase());
        assert!(has(method));
        for name in ["x-http-method-override", "x_http_method", "x-method-override"] {
            let texts = fields.get_all(name).iter().filter_map(|value| value.to_str().ok());
            assert!(texts.filter(|text| !text.is_empty()).flat_map(|text| text.split(',')).all(|one| has(one.trim())));
        }
        for name in fields.keys() {
            let bytes = fields.get_all(name).iter().map(|value| value.len() + 1).sum::<usize>() - 1;
            assert_eq!(asked.header(name.as_str()).map(|text| text.chars().count()), Some(bytes));
        }
        assert!(asked.client_key().is_ok());
        let _ = (asked.client_address(), asked.is_preflight());
    }
}
