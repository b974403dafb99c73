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
use crate::gated::Gated;
use crate::http::{Answering, Serving, trusted};
use crate::metrics::{self, AskedBy};
use crate::readings;
use crate::report::{report_refused, shown};
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

/// As `check`, by limits that Python charges. `size`: the bytes of the call.
pub async fn check_by_gate(
    gated: &Gated,
    peer: Option<IpAddr>,
    asked: CheckRequest,
    size: usize,
) -> Result<CheckResponse, Status> {
    let worker = gated.following.worker();
    let client = worker.plan.client.as_ref();
    // What is described isn't held while Python is asked.
    let asked = described(client, peer, asked).map(|(method, path, fields, origin)| {
        let asked = Asked::new(&method, readings::of_target(path.as_bytes()), &fields, client, origin);
        worker.for_gate(&[asked], Mode::Charge)
    });
    let decided = match asked {
        Err(status) => Err(status),
        Ok(asked) => Ok(gated.decided(&worker, asked, size).await),
    };
    answered(&gated.serving, gated.number, decided)
}

fn answered(serving: &Serving, number: usize, decided: Result<Outcome, Status>) -> Result<CheckResponse, Status> {
    serving.count(
        number,
        AskedBy::Authorization,
        match &decided {
            Err(status) => {
                report_refused(status.message());
                metrics::Result::Refused
            }
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

#[cfg(test)]
pub mod tests {
    use prost::Message;

    use super::*;
    use crate::client::tests::behind;
    use crate::fuzz::Target;

    pub const CHECKS: Target = Target {
        name: "checks",
        seeds: &[
            b"\x0a.\x0a\x0f\x0a\x0d\x0a\x0b\x12\x09192.0.2.1\"\
                \x1b\x12\x19\x12\x03GET\x1a\x0a\x0a\x04host\x12\x02ab\"\x06/login",
            b"\x0a1\x0a\x04\x0a\x02\x12\0\")\x12'\x12\x03PUT\"\x01*\
                j\x1d\x0a\x0d\x0a\x01a\x12\x04text\x1a\x02\xe9\xff\x0a\x0c\x0a\x05:path\x12\x03a b",
        ],
        check: a_check_describes_a_request,
    };

    fn a_check_describes_a_request(data: &[u8]) -> bool {
        let Ok(asked) = CheckRequest::decode(data) else { return false };
        let (client, proxy) = (behind("forwarded"), as_address("10.0.0.1"));
        assert!(described(Some(&client), as_address("192.0.2.9"), asked.clone()).is_err(), "it is no proxy");
        let with_client = described(Some(&client), proxy, asked.clone());
        let Ok((method, path, fields, origin)) = described(None, None, asked.clone()) else {
            assert!(with_client.is_err());
            return false;
        };
        assert!(matches!(origin, Origin::Client(None)));
        let sent = asked.attributes.and_then(|attributes| attributes.request?.http).unwrap();
        assert!(!method.is_empty() && method == sent.method && !path.is_empty() && path == sent.path);
        let most = sent.header_map.map_or(sent.headers.len(), |raw| raw.headers.len());
        assert!(fields.len() <= most && most <= MOST_FIELDS);
        let Ok((.., origin)) = with_client else { return false };
        assert!(matches!(origin, Origin::Peer(_)));
        true
    }
}
