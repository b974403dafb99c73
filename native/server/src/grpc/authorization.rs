//! `envoy.service.auth.v3.Authorization`: a whole request, as Envoy has received it.

use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use tonic::{Code, Status};

use super::messages::auth::{
    Address, AttributeContext, CheckRequest, CheckResponse, DeniedHttpResponse, HeaderValueOption, HttpRequest,
    HttpStatus, OkHttpResponse, Status as Verdict,
};
use super::messages::fields_of;
use crate::answers::Fields;
use crate::client::{ClientAddress, as_address};
use crate::decide::{Mode, Outcome};
use crate::gate::Question;
use crate::gated::Gated;
use crate::http::{Answering, Serving, trusted};
use crate::metrics::{self, AskedBy};
use crate::readings;
use crate::report::shown;
use crate::request::{Asked, Origin};

/// Header fields of a request. Envoy takes 100 by default.
const MOST_FIELDS: usize = 4096;

pub fn check(answering: &Answering, peer: Option<IpAddr>, asked: CheckRequest) -> Result<CheckResponse, Status> {
    let worker = answering.worker();
    let client = worker.plan.client.as_ref();
    let decided = described(client, peer, asked).map(|(method, path, fields, origin)| {
        let asked = Asked::new(&method, readings::of_target(path.as_bytes()), &fields, client, origin);
        worker.decide(&asked, Mode::Charge)
    });
    answered(&answering.serving, answering.number, decided)
}

/// As `check`, by Python's gate.
pub async fn check_by_gate(gated: &Gated, peer: Option<IpAddr>, asked: CheckRequest) -> Result<CheckResponse, Status> {
    let decided = match described(gated.asking.client(), peer, asked) {
        Err(status) => Err(status),
        Ok((method, path, fields, origin)) => {
            let readings = readings::of_target(path.as_bytes());
            Ok(gated.asking.ask(Question { method, readings, fields, origin }).await)
        }
    };
    answered(&gated.serving, gated.number, decided)
}

fn answered(serving: &Serving, number: usize, decided: Result<Outcome, Status>) -> Result<CheckResponse, Status> {
    serving.count(
        number,
        AskedBy::Authorization,
        match &decided {
            Err(_) => metrics::Result::Refused,
            Ok(Outcome { denial: None, .. }) => metrics::Result::Allowed,
            Ok(_) => metrics::Result::Denied,
        },
    );
    decided.map(response)
}

/// The method, the target, the fields and the origin of the request; an error if it can't be read, or if its proxy is
/// configured wrongly.
fn described(
    client: Option<&ClientAddress>,
    peer: Option<IpAddr>,
    asked: CheckRequest,
) -> Result<(String, String, HeaderMap, Origin), Status> {
    trusted(client, peer).map_err(Status::permission_denied)?;
    let AttributeContext { source, request } = asked.attributes.unwrap_or_default();
    let Some(HttpRequest { method, path, headers, header_map }) = request.and_then(|request| request.http) else {
        return Err(Status::invalid_argument("a request has attributes.request.http"));
    };
    if method.is_empty() || path.is_empty() {
        return Err(Status::invalid_argument("a request has attributes.request.http with method and path"));
    }
    let mut fields = HeaderMap::new();
    let count = header_map.as_ref().map_or(headers.len(), |raw| raw.headers.len());
    if count > MOST_FIELDS {
        return Err(Status::invalid_argument(format!("a request has at most {MOST_FIELDS} fields")));
    }
    match header_map {
        None => headers.into_iter().for_each(|(name, value)| add(&mut fields, &name, value.as_bytes())),
        Some(raw) => raw.headers.into_iter().for_each(|one| {
            let value = if one.raw_value.is_empty() { one.value.as_bytes() } else { &one.raw_value };
            add(&mut fields, &one.key, value);
        }),
    }
    let origin = match source.and_then(|source| source.address) {
        _ if client.is_none() => Origin::Client(None),
        Some(Address { socket_address: Some(socket), .. }) => {
            let address = as_address(&socket.address);
            Origin::Peer(Some(address.ok_or_else(|| {
                Status::invalid_argument(format!("attributes.source has the address {}", shown(&socket.address)))
            })?))
        }
        Some(Address { pipe: Some(_), .. }) => Origin::Peer(None),
        _ => return Err(Status::invalid_argument("a request has attributes.source.address, the client's")),
    };
    Ok((method, path, fields, origin))
}

/// Pseudo-fields such as `:path` are no fields; Envoy has replaced what can't be in a value.
fn add(fields: &mut HeaderMap, name: &str, value: &[u8]) {
    if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value)) {
        fields.append(name, value);
    }
}

fn response(outcome: Outcome) -> CheckResponse {
    let options = |fields: Fields| -> Vec<HeaderValueOption> {
        fields_of(fields).into_iter().map(|field| HeaderValueOption { header: Some(field) }).collect()
    };
    let verdict = |code: Code| Some(Verdict { code: code.into() });
    match outcome.denial {
        None => CheckResponse {
            status: verdict(Code::Ok),
            ok_response: Some(OkHttpResponse { response_headers_to_add: options(outcome.fields) }),
            denied_response: None,
        },
        Some(denial) => CheckResponse {
            status: verdict(Code::PermissionDenied),
            denied_response: Some(DeniedHttpResponse {
                status: Some(HttpStatus { code: denial.status.into() }),
                headers: options(denial.fields),
                body: denial.body,
            }),
            ok_response: None,
        },
    }
}
